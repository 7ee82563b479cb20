// How to shard a module: the strategy, which modules are units, how their bytes are laid out, how sums are taken.
#pragma once

#include <torch/nn/module.h>

#include <concepts>
#include <cstdint>
#include <functional>
#include <limits>
#include <optional>
#include <string>

#include "shardproof/algebra/layout.h"
#include "shardproof/algebra/strategy.h"
#include "shardproof/nn/initialize.h"
#include "shardproof/sharding/precision.h"

namespace shardproof {

// Chooses modules among the descendants of the root. The root is always a unit; it holds what no other unit does.
using UnitSelector = std::function<bool(const std::string& name, const torch::nn::Module& module)>;

// Every module of these types, e.g. by_type<GptBlockImpl>().
template <class... Modules>
UnitSelector by_type() {
  return [](const std::string&, const torch::nn::Module& module) {
    return (... || (dynamic_cast<const Modules*>(&module) != nullptr));
  };
}

// Every module whose name fits the pattern (base/name_pattern.h).
UnitSelector by_name(std::string pattern);

// Chooses parameters, by their first name.
using ParameterSelector = std::function<bool(const std::string& name, const at::Tensor& parameter)>;

// What stays gathered between a unit's forward and its backward.
class Reshard {
 public:
  static Reshard by_strategy() { return Reshard(int64_t{-2}); }  // Strategy::between; where it has none, nothing
  static Reshard always() { return Reshard(int64_t{0}); }  // nothing
  static Reshard never() { return Reshard(int64_t{-1}); }  // everything
  // Groups of `ranks` neighbours along dp_shard keep the parameters between them, each an equal part, so that the gather before
  // the backward stays within such a group. Must divide the axis' size. 1 is `never`, the whole axis is `always`.
  static Reshard within(int64_t ranks) { return Reshard(ranks == 1 ? -1 : ranks > 1 ? ranks : kImpossible); }
  template <std::same_as<bool> Bool>
  Reshard(Bool reshard) : ranks_(reshard ? 0 : -1) {}  // so that `reshard_after_forward = true` reads

  bool keeps_everything() const { return ranks_ == -1; }
  bool asks_strategy() const { return ranks_ == -2; }
  // 0: not in parts. A number below 1 that `within` was given divides no axis, and is refused where one is known.
  int64_t ranks() const { return ranks_ > 1 ? ranks_ : 0; }
  bool operator==(const Reshard&) const = default;

 private:
  static constexpr int64_t kImpossible = int64_t{1} << 40;
  explicit Reshard(int64_t ranks) : ranks_(ranks) {}
  int64_t ranks_;
};

// `ordered`: sums in rank order; the gradient norm is exact and rounded once, so it does not depend on where shards are cut.
// `canonical`: besides, each microbatch's gradient is turned into 64-bit fixed point (a multiple of 2^-44, below 2^18 in
// magnitude), so sums do not depend on any order: every mesh, strategy and way to deal microbatches to ranks and rounds has the
// same bits. Needs a loss whose weights do not depend on the mesh (gradient_divide = 1, or by tokens).
// `fast`: sums as the backend takes them, plain norms.
enum class Numerics { ordered, canonical, fast };

// Where the division of the summed gradient happens; in total it is always by the same number.
enum class Divide {
  after,          // once, after the sum
  before,         // each rank's term, before the sum
  split,          // a power of two near the square root before, the rest after, so that float16 neither overflows nor vanishes
  in_collective   // each reduction divides by the size of its group, in the dtype on the wire, as NCCL's average does
};

enum class Granularity {
  element,  // shards are cut anywhere
  tensor    // a parameter lies whole on one rank, as matrix optimizers want it; offsets then depend on the mesh
};

// How memory of gathered parameters is given back.
enum class Buffers {
  freed,  // to the allocator
  pooled  // to a pool that keeps two buffers of each size; no gather ahead starts while both are in use
};

// How a rank comes to see whole parameters that are sharded.
enum class Gather {
  copied,       // by an all-gather into a buffer of its own
  side_by_side  // the shards of all ranks lie beside each other in memory that the ranks share, so that nothing is moved and
                // nothing freed; needs Comm::shared_memory. The optimizer's step then waits for the other ranks; who writes
                // main parameters by hand lets all ranks meet before.
};

// Where the optimizer's memory is: main parameters, its state, and final gradients. Not `none`: in the host's, where the CPU
// updates it; the bits are the same, but for rules with matrix products (muon), which a GPU rounds differently. Between steps
// the device then holds the parameters in the compute dtype and nothing else; in a step, final gradients of two buckets at most
// on their way to the host while the backward goes on, in place of all. Where ranks along tp have terms of gradients, those of
// all buckets stay until the terms are added. The host holds the rest, and where compute and main dtype differ one more copy of
// the rank's state layout in the former.
enum class Offload {
  none,
  pinned,   // on CUDA in page-locked memory, so that copies run beside the device's work; elsewhere as `pageable`. LibTorch's
            // allocator of it rounds each block up to a power of two, and keeps what is freed
  pageable  // in plain memory, for hosts that cannot lock so much; copies from and to a GPU then block
};

// What one unit has of its own. What is left open is as ShardOptions says for all units.
struct UnitOptions {
  std::optional<Reshard> reshard_after_forward = {};
  std::optional<Precision> precision = {};
  bool recompute = false;  // this unit as well as those that ShardOptions::recompute chooses
  std::optional<Strategy> strategy = {};
  // The same ranks under other axes, whose names and sizes the unit's strategy then means: dp_replicate=2,dp_shard=4, say,
  // where all others have dp_shard=8. Its gradients must be summed over the same ranks as theirs, and its `tp` be the same.
  std::optional<Mesh> mesh = {};
  // Takes the place of ShardOptions::gradient_divide.
  std::optional<double> gradient_divide = {};
};

struct ShardOptions {
  Strategy strategy = shardproof::strategy("zero3");

  // Units. Empty: the root is the only one. Units may nest: a parameter belongs to the innermost.
  UnitSelector units = {};
  // Parameters that stay plain tensors: not moved, not reduced, not updated.
  ParameterSelector ignored = {};
  // Units whose activations are computed again in the backward instead of kept.
  UnitSelector recompute = {};

  // A unit's parameters go into one bucket; or into several of at most this many bytes each; or into this many. 0: one.
  int64_t bucket_bytes_max = 0;
  int64_t bucket_count = 0;
  // Every parameter starts at a multiple of this in its bucket; a power of two and at least 64, because vector kernels
  // round differently at other offsets.
  int64_t alignment_bytes = 512;
  Granularity granularity = Granularity::element;

  // The root keeps its own parameters until its backward, unless it is told otherwise by Sharded::unit("").
  Reshard reshard_after_forward = Reshard::by_strategy();
  bool reshard_after_backward = true;
  Buffers buffers = Buffers::freed;
  Gather gather = Gather::copied;
  Offload offload = Offload::none;
  // How many units ahead are gathered while one runs, in the order in which units were registered, backwards in the backward.
  int64_t prefetch_forward = 0;
  int64_t prefetch_backward = 0;
  // No gather ahead, and no further reduction, starts while more bytes than this are in flight. 0: no limit.
  int64_t bytes_in_flight_max = 0;

  Precision precision = {};
  // Options of some units, by the unit's name; those given to Sharding::unit come before them. Empty: none have their own.
  std::function<UnitOptions(const std::string& unit)> unit_options = {};

  Numerics numerics = Numerics::ordered;
  // The reduced gradient is divided by this, once, however many axes it is summed over. 0: by the number of ranks it was summed
  // over, which averages losses that are means over each rank's samples.
  double gradient_divide = 0;
  Divide divide = Divide::after;
  // Instead: by the number of tokens that all ranks reported with Sharded::add_tokens in this step (at least 1). For losses
  // that are sums.
  bool divide_by_tokens = false;
  // Sum over dp_replicate after every microbatch, instead of once after the last.
  bool reduce_replicas_every_microbatch = false;

  // Before any communication: NaN, infinity, or a magnitude above this in a gradient is an error that names rank, step and
  // parameter. `check_gradients = false` leaves that to a LossScaler.
  bool check_gradients = true;
  double gradient_magnitude_max = std::numeric_limits<double>::infinity();

  // Where parameters of the meta device will be. Empty: where the others are, else the CPU. See device.h.
  std::optional<c10::Device> device = {};
  // Start from rank 0's parameters and buffers everywhere.
  bool broadcast_initial_values = true;
  // For a model built under MetaInit; see meta_init.h.
  Initializer initialize = {};
};

}  // namespace shardproof
