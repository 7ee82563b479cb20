// Small modules and helpers for properties of the sharding library.
#pragma once

#include <ATen/ATen.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

#include <functional>
#include <memory>
#include <string>

#include "shardproof/shardproof.h"

namespace toy {

// Two linear units with a probe between them, one frozen linear on request, and one parameter that nothing uses.
class NetImpl : public torch::nn::Module {
 public:
  struct Options {
    bool freeze_second = false;  // LoRA-like: the frozen layer feeds on, the first trains
    bool unused = false;
    int64_t calls_of_first = 1;
  };
  explicit NetImpl(Options options);
  at::Tensor forward(at::Tensor x);

  torch::nn::Linear first{nullptr}, second{nullptr};
  at::Tensor unused;
  std::function<void()> between = [] {};

 private:
  Options options_;
};
TORCH_MODULE(Net);

// A unit whose frozen weight is read by the backward after the last trainable gradient arrived.
class AdapterImpl : public torch::nn::Module {
 public:
  AdapterImpl(int64_t in, int64_t out);
  at::Tensor forward(at::Tensor x);
  at::Tensor frozen, down, up;
};
TORCH_MODULE(Adapter);

// Runs `body(comms)` on a mesh of `world` ranks along dp_shard and one along dp_replicate.
void on_ranks(int64_t world, const std::function<void(std::shared_ptr<shardproof::MeshComm>)>& body,
              const shardproof::ThreadsOptions& options = {});

// Deterministic values that differ by rank and by index.
at::Tensor data(std::vector<int64_t> sizes, int64_t salt);

shardproof::ShardOptions options(const std::string& strategy);

// Whether its elements can be read; those of a parameter that is sharded cannot.
bool has_memory(const at::Tensor& tensor);

}  // namespace toy
