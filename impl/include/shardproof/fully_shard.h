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
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "shardproof/layout.h"
#include "shardproof/mesh_comm.h"
#include "shardproof/strategy.h"
#include "shardproof/unit.h"

namespace shardproof {

// Chooses the units among the descendants of the root. The root is always one; it holds what no other unit does.
using UnitSelector = std::function<bool(const std::string& name, const torch::nn::Module& module)>;

// Every module of these types, e.g. by_type<GptBlockImpl>().
template <class... Modules>
UnitSelector by_type() {
  return [](const std::string&, const torch::nn::Module& module) {
    return (... || (dynamic_cast<const Modules*>(&module) != nullptr));
  };
}

// `ordered`: the gradient norm is the exact sum of squares, rounded once, so it does not depend on where shards are cut.
// `fast`: plain double sums.
enum class Numerics { ordered, fast };

struct ShardOptions {
  Strategy strategy = shardproof::strategy("zero3");
  UnitSelector units = {};  // empty: the root is the only unit
  // A unit's parameters go into one bucket, or into several of at most this many bytes each. 0: one.
  int64_t bucket_bytes_max = 0;
  // Every parameter starts at a multiple of this in its bucket; a power of two and at least 64, because vector kernels
  // round differently at other offsets.
  int64_t alignment_bytes = 512;
  // Free gathered parameters between a unit's forward and backward. The root keeps its own.
  bool reshard_after_forward = true;
  Numerics numerics = Numerics::ordered;
  // The reduced gradient is divided by this, once. 0: by the number of ranks it was summed over, which averages losses
  // that are means over each rank's samples.
  double gradient_divide = 0;
  // Start from rank 0's parameters and buffers everywhere.
  bool broadcast_initial_values = true;
};

// A run of one parameter's row-major elements that this rank holds, and where they are.
struct Piece {
  std::string name;  // of the parameter; of a tied one, its first name
  Shape shape;       // of the whole parameter
  Interval run;      // in the row-major numbering of its elements; never empty
  at::Tensor data;   // 1-D, run.size() elements, the live memory
};

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
