// Adapters of low rank (LoRA: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models"). Each chosen linear layer W
// gets two small ones, A and B, and computes  W x + scale * B (A x).  Only A and B train.
//
//   Gpt model(options);
//   const Lora lora = add_lora(model.ptr(), {.rank = 8, .alpha = 16, .targets = {"h.*.attn.c_attn"}});
//   TensorParallel parallel = parallelize(model.ptr(), comms, lora.with_styles(gpt_plan(options)));   // where there is "tp"
//   Sharded sharded = fully_shard(model.ptr(), comms, {...});      // any strategy
//   ...; checkpoint::save_adapters("run/adapters", sharded, lora);  // checkpoint/adapters.h
//   lora.merge(sharded);                                            // the base computes what both computed before
//
// A and B are modules of the layer, named "lora_A" and "lora_B": "h.0.attn.c_attn.lora_A.weight" [rank, inputs] and
// "h.0.attn.c_attn.lora_B.weight" [outputs, rank]. They are parameters like others: of units, of checkpoints, of plans.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "shardproof/parallel/tensor/parallel_plan.h"
#include "shardproof/sharding/fully_shard.h"

namespace shardproof {

struct LoraOptions {
  int64_t rank = 8;
  double alpha = 0;  // the scale is alpha / rank; 0: alpha is twice the rank
  // Patterns of the names of layers (base/name_pattern.h). A pattern that matches no linear layer is an error.
  std::vector<std::string> targets = {};
  uint64_t seed = 0;  // of the first values of A; those of B are zeros, so that the model computes at first what it computed
  // Of the input of A while the model trains (nn/dropout.h): the probability of zero. The layer then has a module
  // "lora_dropout". Masks do not depend on the mesh.
  double dropout = 0;
};

class [[nodiscard]] Lora {
 public:
  struct State;
  explicit Lora(std::shared_ptr<State> state) : state_(std::move(state)) {}

  // The names of the layers that have adapters, in the order of the module.
  const std::vector<std::string>& layers() const;
  const LoraOptions& options() const;
  double scale() const;

  // The plan with styles for A and B of each layer, so that they are cut as the layer is: of a ColumnParallel layer B is cut by
  // rows and A is whole; of a RowParallel layer A is cut by columns and B is whole. Dropout is cut as the input of A is. Throws
  // Error when a layer has a style that is not one of a linear layer.
  ParallelPlan with_styles(ParallelPlan plan) const;

  // Adds scale * B A to each layer's main weight and makes B zero. The model then computes, up to rounding, what it computed
  // before, and its base alone does so too. Each rank adds its own part: for each element the products of A and B are added in
  // the order of the rank, each operation rounded to the main dtype, so that the bits do not depend on how weights are cut. A
  // rank holds A and B of one layer whole, and rows of the product for its part of the layer's weight. Throws Error and
  // changes nothing inside a backward, while averages are in place, or when the weight of a layer is not in the Sharded or is
  // that of another layer too (a tied head). Collective over the mesh.
  void merge(Sharded& sharded) const;
  // Whether adapters were merged into the weights that the Sharded has: by `merge`, or by the run that saved the checkpoint
  // that it loaded last. load_weights ends that, because the weights are then those of its file.
  bool is_merged(const Sharded& sharded) const;
  // Whether adapters with these values were, by the names of parameters. The weights have what they would add already.
  bool is_merged(const Sharded& sharded, const std::map<std::string, at::Tensor>& values) const;

 private:
  std::shared_ptr<State> state_;
};

// Gives the chosen layers below the module adapters, and freezes every parameter that there is (requires_grad becomes false).
// Call it before use_canonical_arithmetic, parallelize and fully_shard, on every rank alike. The layers have adapters as long
// as one of these lives: the Lora, a copy of it, or a Sharded made of the module while it had them. It must be entered through
// `call`. First values of A are those of PEFT, uniform in [-1 / sqrt(inputs), 1 / sqrt(inputs)), as a function of seed, name
// and index. Throws Error when the rank is below 1, a pattern matches no torch::nn::Linear, a layer has an adapter already, or
// the module is parallel, sharded or without memory (meta).
Lora add_lora(std::shared_ptr<torch::nn::Module> module, LoraOptions options);

// The names of the parameters A and B of a layer.
struct AdapterParameters {
  std::string a, b;
};
AdapterParameters adapter_parameters(const std::string& layer);
// Whether a parameter of this name is A or B of a layer.
bool is_adapter_parameter(const std::string& name);

// Describes adapters that layers of these names have already, under the names above, for a program that adds them to its
// forward itself. The result names, cuts, merges and saves them, and attaches nothing. `inputs`: how many features each layer
// takes, which with_styles needs to know where there is dropout.
Lora described_lora(std::vector<std::string> layers, LoraOptions options, std::map<std::string, int64_t> inputs = {});

}  // namespace shardproof
