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
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "shardproof/comm/mesh_comm.h"
#include "shardproof/hooks/unit.h"
#include "shardproof/sharding/memory.h"
#include "shardproof/sharding/piece.h"
#include "shardproof/sharding/shard_options.h"

namespace shardproof {

class Unit;

// One unit of a sharded module. Valid as long as that is.
class UnitHandle {
 public:
  explicit UnitHandle(Unit& unit) : unit_(&unit) {}

  const std::string& name() const;
  bool is_unsharded() const;

  // Gathers the parameters by hand. `unshard` returns when they are whole; `start_unshard` at once, and the unit's next
  // forward, or `unshard`, waits. Collective along the axes that the strategy splits parameters over, as all calls of units
  // are.
  void start_unshard();
  void unshard();
  // Frees them. Nothing when they are not whole; an error while a gather is in flight.
  void reshard();

  // From the next forward on; the same on every rank.
  void set_reshard_after_forward(Reshard reshard);
  void set_reshard_after_backward(bool reshard);
  // While false, backwards add to this unit's gradients on this rank and do not reduce them; those of other units go their way.
  // `recurse`: of the units below it as well. Gradients are reduced where neither the unit nor Sharded::set_gradient_sync says
  // otherwise, and the last backward of a step must reduce all. The same on every rank; not inside a backward.
  void set_gradient_sync(bool sync, bool recurse = true);
  bool gradient_sync() const;
  // Units to gather while this one runs, in this order; instead of what ShardOptions::prefetch_* chose.
  void set_forward_prefetch(const std::vector<UnitHandle>& units);
  void set_backward_prefetch(const std::vector<UnitHandle>& units);

 private:
  Unit* unit_;
};

class Sharded {
 public:
  struct Impl;  // private to the library
  explicit Sharded(std::shared_ptr<Impl> impl);
  Sharded(Sharded&&) noexcept;
  Sharded& operator=(Sharded&&) noexcept;
  // The module stays behind in whatever layout it was; using it afterwards is an error until it is sharded again.
  ~Sharded();

  // Whether the next backward is the last before the optimizer's step; true at first. Backwards that are not last accumulate:
  // as the strategy says, before or after a reduction. Running another backward after the last one, without a step or
  // zero_gradients between, is an error.
  void set_last_microbatch(bool last);
  // While false, backwards add to gradients on this rank and nothing is reduced (no_sync). The last one must be true.
  void set_gradient_sync(bool sync);
  bool gradient_sync() const;

  // How many tokens this rank's next backward is about; needed with ShardOptions::divide_by_tokens, before the last backward.
  void add_tokens(int64_t tokens);

  // Work on the final gradients, at the end of every last backward: what Megatron calls finalize_model_grads. Steps run on
  // every rank by ascending `order`, which is above 0, equal ones as added. Those of the library: reduction and division by the
  // number of ranks 0, sums over the tensor-parallel axis 100, division by the number of tokens 1000.
  void add_finishing_step(std::string name, int64_t order, std::function<void(Sharded&)> step);

  // Forgets accumulated gradients. `Optimizer::step` does it. After a backward that ended in an exception it also forgets what
  // that left half done, provided that it ended at the same point on every rank, and the model can be trained on.
  void zero_gradients();

  // The norm of the whole gradient, each element of each parameter counted once; order 1, 2 or infinity. Collective over the
  // mesh; after the last backward. Throws NonFiniteError, naming step and parameter, when it is NaN or infinite.
  double gradient_norm(double order = 2);

  // Scales gradients by norm_max / (norm + 1e-6), rounded to their dtype, when that is below 1, and returns the norm before.
  double clip_gradients(double norm_max, double order = 2);
  // Divides gradients; after the last backward. Not collective.
  void divide_gradients(double divisor);
  // Whether any element on any rank is NaN or infinite. Collective over the mesh.
  bool gradients_are_finite();
  // Ends a step without an update: gradients are forgotten, parameters stay.
  void skip_step();

  // What this rank holds between steps: parameters in the strategy's `parameter` layout and the compute dtype, main parameters
  // and gradients in its `state` layout and the main dtype (gradients only after the last backward, and only of parameters that
  // require them). Ascending by bucket and offset; no padding. With ShardOptions::offload the latter two are CPU tensors, and
  // main parameters are written only in pieces taken after the last step: older ones may still be on their way to the device.
  std::vector<Piece> parameters() const;
  std::vector<Piece> main_parameters() const;
  std::vector<Piece> gradients() const;
  // After main parameters were written to (loading a checkpoint): brings the parameters up to date. Collective.
  void main_parameters_changed();

  // Whole parameters by name, joined over tensor parallelism as well, tied ones under every name, on every rank, in the compute
  // dtype. Collective.
  std::vector<std::pair<std::string, at::Tensor>> gather_parameters() const;

  // "" is the root; a unit of several modules goes by the name of the first. Throws Error listing the names there are.
  UnitHandle unit(const std::string& name);
  std::vector<UnitHandle> units();

  MemoryUse memory() const;
  void reset_peak_memory();

  // Steps taken so far, skipped ones included.
  int64_t step() const;
  // Of this rank in the mesh.
  int64_t rank() const;

  // One line a unit: parameters, buckets, bytes at rest and in compute, on this rank.
  std::string describe() const;

  Impl& impl() { return *impl_; }
  // For those that are to notice when it is gone.
  std::weak_ptr<Impl> watch() const { return impl_; }

 private:
  std::shared_ptr<Impl> impl_;
};

// Backwards in its lifetime reduce nothing.
class NoSync {
 public:
  explicit NoSync(Sharded& sharded) : sharded_(sharded), before_(sharded.gradient_sync()) { sharded_.set_gradient_sync(false); }
  ~NoSync() { sharded_.set_gradient_sync(before_); }
  NoSync(const NoSync&) = delete;

 private:
  Sharded& sharded_;
  bool before_;
};

// The same for one unit, without those below it.
class UnitNoSync {
 public:
  explicit UnitNoSync(UnitHandle unit) : unit_(unit), before_(unit.gradient_sync()) { unit_.set_gradient_sync(false, false); }
  ~UnitNoSync() { unit_.set_gradient_sync(before_, false); }
  UnitNoSync(const UnitNoSync&) = delete;

 private:
  UnitHandle unit_;
  bool before_;
};

// Collective over all ranks of `comms`. The module's parameters become views into buckets; their values are kept. Throws
// Error when a parameter is not floating, shares memory with another one, or is already sharded; when parameters are on several
// devices, or on a device that this process has no arithmetic for (use_cuda() gives it that of GPUs), or on another device than
// the CPU under canonical arithmetic; when the mesh lacks an axis of the strategy, or has ranks along "tp" along which
// parallelize has cut nothing; or when options are out of range. A parameter that is not contiguous becomes so.
Sharded fully_shard(std::shared_ptr<torch::nn::Module> module, std::shared_ptr<MeshComm> comms, ShardOptions options);

// The same, unit by unit:
//
//   Sharding sharding(comms, options);
//   for (auto& block : model->blocks) sharding.unit(block.ptr());
//   sharding.unit({model->norm.ptr(), model->head.ptr()}, {.reshard_after_forward = false});   // two modules, one unit
//   Sharded sharded = sharding.shard(model.ptr());
class Sharding {
 public:
  using Modules = std::vector<std::shared_ptr<torch::nn::Module>>;
  Sharding(std::shared_ptr<MeshComm> comms, ShardOptions options) : comms_(std::move(comms)), options_(std::move(options)) {}

  // Throws Error when the list is empty, has a null, or a module that is in a unit already.
  Sharding& unit(std::shared_ptr<torch::nn::Module> module, UnitOptions options = {}) {
    return unit(Modules{std::move(module)}, options);
  }
  Sharding& unit(Modules modules, UnitOptions options = {});
  // Collective. Units chosen by ShardOptions::units come besides. Throws Error when a module is not below the root.
  Sharded shard(std::shared_ptr<torch::nn::Module> root) const;

  struct Entry {
    Modules modules;
    UnitOptions options;
  };

 private:
  std::shared_ptr<MeshComm> comms_;
  ShardOptions options_;
  std::vector<Entry> entries_;
};

}  // namespace shardproof
