// Shards a module's training over a mesh: its parameters, gradients and optimizer state, as a `Strategy` says.
//
//   auto model = Gpt(options);                                      // any torch::nn::Module that uses `call`
//   Sharded sharded = fully_shard(model.ptr(), comms, {.strategy = strategy("zero3"), .units = by_type<GptBlockImpl>()});
//   Optimizer optimizer = adamw(sharded, {.lr = 1e-3});
//   for (...) {
//     for (int64_t k = 0; k < rounds; ++k) {
//       sharded.set_last_microbatch(k + 1 == rounds);
//       (loss_of(call(model, input), target) / rounds).backward();
//     }
//     sharded.clip_gradients(1.0);
//     optimizer.step();
//   }
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "shardproof/mesh_comm.h"
#include "shardproof/piece.h"
#include "shardproof/shard_options.h"
#include "shardproof/unit.h"

namespace shardproof {

class ShardedState;

class Sharded {
 public:
  explicit Sharded(std::shared_ptr<ShardedState> state);
  Sharded(Sharded&&) noexcept;
  Sharded& operator=(Sharded&&) noexcept;
  // The module stays behind in whatever layout it was; using it afterwards is an error until it is sharded again.
  ~Sharded();

  // Whether the next backward is the last before the optimizer's step; true at first. Backwards that are not last only
  // accumulate. Running another backward after the last one, without a step or zero_gradients between, is an error.
  void set_last_microbatch(bool last);

  // Forgets accumulated gradients. `Optimizer::step` does it.
  void zero_gradients();

  // The 2-norm of the whole gradient, each element of each parameter counted once. Collective over the mesh; after the
  // last backward. Throws NonFiniteError, naming step and parameter, when it is NaN or infinite.
  double gradient_norm();

  // Scales gradients by float(norm_max / (norm + 1e-6)) when that is below 1, and returns the norm before. Collective.
  double clip_gradients(double norm_max);

  // What this rank holds between steps: parameters in the strategy's `parameter` layout, gradients in its `state` layout
  // (empty before the last backward). Ascending by bucket and offset; no padding.
  std::vector<Piece> parameters() const;
  std::vector<Piece> gradients() const;

  // Whole parameters by name, tied ones under every name, on every rank. Collective.
  std::vector<std::pair<std::string, at::Tensor>> gather_parameters() const;

  // Steps taken so far.
  int64_t step() const;

  // One line a unit: parameters, buckets, bytes at rest and in compute, on this rank.
  std::string describe() const;

  ShardedState& state() { return *state_; }

 private:
  std::shared_ptr<ShardedState> state_;
};

// Collective over all ranks of `comms`. The module's parameters become views into buckets; their values are kept. Throws
// Error when a parameter is not float32 on CPU, not contiguous, or already sharded; when the strategy names an axis that the
// mesh lacks; or when the options are out of range.
Sharded fully_shard(std::shared_ptr<torch::nn::Module> module, std::shared_ptr<MeshComm> comms, ShardOptions options);

}  // namespace shardproof
