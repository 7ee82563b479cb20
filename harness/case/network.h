// The models under test as a user would write and call them: those of the library, and some of the harness' own with parts that
// real models hide.
#pragma once

#include <torch/nn/module.h>

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "golden/golden.h"
#include "shardproof/checkpoint/hugging_face.h"
#include "shardproof/comm/comm.h"
#include "shardproof/models/lora.h"
#include "shardproof/models/models.h"
#include "shardproof/nn/auxiliary_losses.h"

namespace harness {

struct Network {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor(const golden::Microbatch&)> output;
  std::function<at::Tensor(const at::Tensor& output, const golden::Microbatch&)> loss_of;  // without its weight
  // The modules that can be units and together hold every parameter but the root's own, in order.
  std::vector<std::shared_ptr<torch::nn::Module>> parts;
  std::optional<shardproof::Lora> lora = {};  // the adapters of its linear layers, if it has any

  // The same network, whose input, and whose output's gradient, lie in memory with the first and the last dim exchanged.
  Network strided() const;

  at::Tensor loss(const golden::Microbatch& data) const {
    shardproof::AuxiliaryLosses auxiliary;
    return auxiliary.add_to(loss_of(output(data), data)) * data.weight;
  }
};

shardproof::GptOptions gpt_options(const golden::Gpt& gpt);
shardproof::LlamaOptions llama_options(const golden::Llama& llama);
// As the library reads it. Its positions are those that it was made for.
golden::Model described_model(const shardproof::checkpoint::HuggingFaceModel& described);
shardproof::LoraOptions lora_options(const golden::Adapters& adapters);

// Biases of routers, as golden runs begin.
void begin_router_biases(torch::nn::Module& module, const golden::Llama& llama);

// Parameters and buffers go there and stay the tensors that they are, those with two names, too.
void move_to(torch::nn::Module& module, c10::Device device);

// `tensor_group`: the ranks that a language model's logits will be cut over; null: they are whole.
Network make_network(const golden::Model& model, shardproof::Comm* tensor_group = nullptr);

}  // namespace harness
