// Shards the training of a module over a mesh: its parameters, gradients and optimizer state, as a `Strategy` says. The
// strategies are those of ZeRO (Rajbhandari et al. 2020), PyTorch's FSDP2 and Megatron-FSDP. The interface follows FSDP2's
// fully_shard.
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
#include <map>
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

// One unit of a sharded module. It is valid as long as the Sharded is.
class UnitHandle {
 public:
  explicit UnitHandle(Unit& unit) : unit_(&unit) {}

  const std::string& name() const;
  bool is_unsharded() const;

  // Gathers the unit's parameters. `unshard` returns when they are whole. `start_unshard` returns at once, and the unit's next
  // forward, or `unshard`, waits for the gather. Both are collective along the axes over which the strategy splits parameters,
  // as forwards of units are.
  void start_unshard();
  void unshard();
  // Waits for a gather in flight, and frees the gathered parameters. It does nothing when none are gathered.
  void reshard();

  // These take effect from the next forward on. All ranks must pass the same value.
  void set_reshard_after_forward(Reshard reshard);
  void set_reshard_after_backward(bool reshard);
  // While it is false, a backward does not gather the unit's parameters, as FSDP2's method of this name has it. It is for units
  // whose backward reads none of them, as that of an embedding; otherwise the backward is undefined.
  void set_unshard_in_backward(bool unshard);
  // While it is false, a backward adds to this unit's gradients on this rank and does not reduce them; other units are not
  // affected. With `recurse` it applies to the units below this one too. A unit's gradients are reduced when neither the unit
  // nor Sharded::set_gradient_sync says otherwise. The last backward of a step must reduce all gradients. All ranks must pass
  // the same value. It must not be called inside a backward.
  void set_gradient_sync(bool sync, bool recurse = true);
  bool gradient_sync() const;
  // The units that are gathered while this one runs, in this order. They replace those that ShardOptions::prefetch_* chose.
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
  // The module stays in the layout in which it is. Using it afterwards is an error until it is sharded again.
  ~Sharded();

  // Says whether the next backward is the last one before the optimizer's step; at first it is. A backward that is not the last
  // accumulates gradients, before or after a reduction, as the strategy says. After the last backward another one throws Error
  // unless a step or zero_gradients comes between. Every rank calls this with the same value. It does not communicate. Throws
  // Error inside a backward.
  void set_last_microbatch(bool last);
  // While it is false, a backward adds to gradients on this rank and reduces nothing, as DDP's no_sync. It must be true for the
  // last backward. Every rank calls this with the same value. It does not communicate. Throws Error inside a backward.
  void set_gradient_sync(bool sync);
  bool gradient_sync() const;

  // Adds to the number of tokens that this rank's backwards of this step cover. It is needed with
  // ShardOptions::divide_by_tokens, and must be called before the last backward.
  void add_tokens(int64_t tokens);

  // Adds work on the final gradients, which runs at the end of every last backward; Megatron-LM calls it finalize_model_grads.
  // Steps run on every rank in ascending `order`, which must be above 0, and steps of equal order run as they were added. The
  // library's own steps are the reduction and the division by the number of ranks (order 0), sums over the tensor-parallel axis
  // (100), and the division by the number of tokens (1000).
  void add_finishing_step(std::string name, int64_t order, std::function<void(Sharded&)> step);

  // Drops accumulated gradients. `Optimizer::step` does this too. After a backward that ended with an exception it also ends
  // the sums that were under way, collectively, and training may go on, provided that the exception came at the same point on
  // every rank. Every rank calls it. Otherwise it does not communicate. Throws Error inside a backward.
  void zero_gradients();

  // The norm of the whole gradient, in which each element of each parameter counts once. The order is 1, 2 or infinity. Call it
  // after the last backward. Throws NonFiniteError, which names step and parameter, when the norm is NaN or infinite.
  // Collective over the mesh.
  double gradient_norm(double order = 2);

  // Multiplies the gradients by norm_max / (norm + 1e-6), rounded to their dtype, when this factor is below 1, as
  // torch.nn.utils.clip_grad_norm_ does. Returns the norm before. It is called, and throws, as gradient_norm.
  double clip_gradients(double norm_max, double order = 2);
  // Divides the gradients. Call it after the last backward, on every rank with the same divisor. It does not communicate.
  void divide_gradients(double divisor);
  // Whether all elements of all gradients on all ranks are finite. Collective over the mesh.
  bool gradients_are_finite();
  // Ends a step without an update: gradients are dropped, and parameters stay as they are. Every rank calls it. It does not
  // communicate.
  void skip_step();

  // What this rank holds between steps. Parameters are in the strategy's `parameter` layout and the compute dtype; where only
  // main ones are kept, they are rounded copies. Main parameters and gradients are in the `state` layout and the main dtype;
  // gradients are there after the last backward, for parameters that require them. Pieces are ascending by bucket and offset,
  // without padding. With ShardOptions::offload main parameters and gradients are CPU tensors. A program that writes to main
  // parameters must then use pieces from after the last step, because older ones may still be on their way to the device.
  std::vector<Piece> parameters() const;
  std::vector<Piece> main_parameters() const;
  std::vector<Piece> gradients() const;
  // What every rank holds between steps, by the parameter's name; of a tied one, by its first name. Not collective.
  std::map<std::string, ParameterPlacement> placements() const;
  // Call it before you write to main parameters, averages or the optimizer's state yourself. It waits until nothing reads them
  // any more: a save that is copying them (ManagerOptions::copy_in_background), or with Gather::side_by_side the other ranks.
  // Throws Error, which begins with `who`, while averages are in the place of the parameters, because what you write would
  // change those. Collective over the mesh with Gather::side_by_side; otherwise it does not communicate.
  void main_parameters_will_change(const char* who = "main_parameters_will_change");
  // Brings the parameters up to date after main parameters were written to, e.g. from a checkpoint. Collective over the mesh.
  void main_parameters_changed();

  // Returns every whole parameter with its name, on every rank, in the compute dtype. Cuts of tensor parallelism are joined
  // too, and a tied parameter is there under each of its names. Throws Error inside a backward, as the calls below do.
  // Collective over the mesh.
  std::vector<std::pair<std::string, at::Tensor>> gather_parameters() const;
  // Every whole main parameter, a tied one under its first name, on every rank, in the main dtype. Collective over the mesh.
  std::map<std::string, at::Tensor> gather_main_parameters() const;
  // Whole gradients of parameters that train, tied ones under their first name, after the last backward, in the main dtype.
  // Throws Error before the last backward of the step. Collective over the mesh.
  std::map<std::string, at::Tensor> gather_gradients() const;
  // One of them alone, by any of its names. A rank holds no other whole tensor meanwhile. Throws Error on every rank when some
  // rank asks for a name that is not there, which suggests one that is near, or for another name than rank 0. Collective over
  // the mesh.
  at::Tensor gather_main_parameter(const std::string& name) const;
  at::Tensor gather_gradient(const std::string& name) const;
  // Writes whole values into the parameters, or into the gradients after the last backward, by name. Every rank passes the
  // same values, and keeps its part of them, rounded to the main dtype. What has no value, and optimizer state, stay as they
  // are. A tied parameter may be given under any of its names. Throws Error on every rank, with nothing written, when ranks
  // pass different names, when a name is unknown (the message suggests one that is near), when a size does not fit or a dtype
  // is not of floating point on some rank, inside a backward, or while averages are in the place of the parameters
  // (optim/ema.h). Collective over the mesh.
  void write_parameters(const std::map<std::string, at::Tensor>& values);
  void write_gradients(const std::map<std::string, at::Tensor>& values);

  // The unit of this name; "" is the root. A unit of several modules has the name of the first. Throws Error, which lists the
  // names, when there is no such unit.
  UnitHandle unit(const std::string& name);
  std::vector<UnitHandle> units();

  MemoryUse memory() const;
  void reset_peak_memory();

  // The number of steps so far, including skipped ones. Messages count from 1: they name the step that comes after these.
  int64_t step() const;
  // This rank's number in the mesh.
  int64_t rank() const;

  // Returns one line for each unit, with its parameters, buckets, and bytes between steps and while it runs, on this rank.
  std::string describe() const;

  Impl& impl() { return *impl_; }
  const Impl& impl() const { return *impl_; }
  // For objects that have to notice when the Sharded is gone.
  std::weak_ptr<Impl> watch() const { return impl_; }

 private:
  std::shared_ptr<Impl> impl_;
};

// While it lives, backwards reduce nothing.
class NoSync {
 public:
  explicit NoSync(Sharded& sharded) : sharded_(sharded), before_(sharded.gradient_sync()) { sharded_.set_gradient_sync(false); }
  ~NoSync() { sharded_.set_gradient_sync(before_); }
  NoSync(const NoSync&) = delete;

 private:
  Sharded& sharded_;
  bool before_;
};

// While it lives, backwards do not reduce the gradients of one unit. Units below that one are not affected.
class UnitNoSync {
 public:
  explicit UnitNoSync(UnitHandle unit) : unit_(unit), before_(unit.gradient_sync()) { unit_.set_gradient_sync(false, false); }
  ~UnitNoSync() { unit_.set_gradient_sync(before_, false); }
  UnitNoSync(const UnitNoSync&) = delete;

 private:
  UnitHandle unit_;
  bool before_;
};

// Shards the module. Its parameters become views into buckets and keep their values; a parameter that is not contiguous becomes
// contiguous. Throws Error in these cases: a parameter is not floating, shares memory with another one, or is sharded already;
// parameters are on several devices, on a device without arithmetic in this process (use_cuda() sets it for GPUs), or, with
// canonical arithmetic, on a device other than the CPU; the mesh lacks an axis of the strategy, or has ranks along "tp"
// although `parallelize` was not called; all of its ranks lie along axes that the strategy does not know, so that each would
// train a model of its own; an option is out of range. Collective over the mesh of `comms`.
Sharded fully_shard(std::shared_ptr<torch::nn::Module> module, std::shared_ptr<MeshComm> comms, ShardOptions options);

// Shards a module whose units are named one by one:
//
//   Sharding sharding(comms, options);
//   for (auto& block : model->blocks) sharding.unit(block.ptr());
//   sharding.unit({model->norm.ptr(), model->head.ptr()}, {.reshard_after_forward = false});   // two modules, one unit
//   Sharded sharded = sharding.shard(model.ptr());
class Sharding {
 public:
  using Modules = std::vector<std::shared_ptr<torch::nn::Module>>;
  Sharding(std::shared_ptr<MeshComm> comms, ShardOptions options) : comms_(std::move(comms)), options_(std::move(options)) {}

  // Makes the modules a unit. Throws Error when the list is empty, contains a null pointer, or contains a module that is in a
  // unit already.
  Sharding& unit(std::shared_ptr<torch::nn::Module> module, UnitOptions options = {}) {
    return unit(Modules{std::move(module)}, options);
  }
  Sharding& unit(Modules modules, UnitOptions options = {});
  // Shards the root. Units that ShardOptions::units chooses are added. Throws Error when a named module is not below the root,
  // and where fully_shard does. Collective over the mesh.
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
