// The options of fully_shard: the strategy, which modules are units, how their memory is laid out, and how sums are taken.
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

// Chooses units among the modules below the root. The root is always a unit and holds the parameters that no other unit holds.
using UnitSelector = std::function<bool(const std::string& name, const torch::nn::Module& module)>;

// Chooses every module of these types, e.g. by_type<GptBlockImpl>().
template <class... Modules>
UnitSelector by_type() {
  return [](const std::string&, const torch::nn::Module& module) {
    return (... || (dynamic_cast<const Modules*>(&module) != nullptr));
  };
}

// Chooses every module whose name matches the pattern (base/name_pattern.h).
UnitSelector by_name(std::string pattern);

// Chooses parameters. `name` is a parameter's first name.
using ParameterSelector = std::function<bool(const std::string& name, const at::Tensor& parameter)>;

// Says a dim of a parameter; one below 0 is counted from behind the last. `name` is the parameter's first name.
using ParameterDim = std::function<int64_t(const std::string& name, const at::Tensor& parameter)>;

// Says how many neighbouring elements of a parameter stay together, at least 1: e.g. the size of a row, or all. `name` is the
// parameter's first name. `part` has the shape and the dtype of what a rank holds of it before data parallelism cuts, and no
// values.
using ParameterGranule = std::function<int64_t(const std::string& name, const at::Tensor& part)>;

// What stays gathered between a unit's forward and its backward. It is FSDP2's reshard_after_forward.
class Reshard {
 public:
  static Reshard by_strategy() { return Reshard(int64_t{-2}); }  // keeps what Strategy::between says, or nothing
  static Reshard always() { return Reshard(int64_t{0}); }  // keeps nothing
  static Reshard never() { return Reshard(int64_t{-1}); }  // keeps everything
  // Each group of `ranks` neighbours along dp_shard keeps the parameters, each rank an equal part, so the gather before the
  // backward stays within such a group. `ranks` must divide the axis' size. 1 means `never`, and the whole axis means `always`.
  static Reshard within(int64_t ranks) { return Reshard(ranks == 1 ? -1 : ranks > 1 ? ranks : kImpossible); }
  template <std::same_as<bool> Bool>
  Reshard(Bool reshard) : ranks_(reshard ? 0 : -1) {}  // allows `reshard_after_forward = true`

  bool keeps_everything() const { return ranks_ == -1; }
  bool asks_strategy() const { return ranks_ == -2; }
  // The number of ranks of `within`; 0 for `always` and `never`. A number below 1 that was given to `within` divides no axis,
  // so fully_shard throws Error.
  int64_t ranks() const { return ranks_ > 1 ? ranks_ : 0; }
  bool operator==(const Reshard&) const = default;

 private:
  static constexpr int64_t kImpossible = int64_t{1} << 40;
  explicit Reshard(int64_t ranks) : ranks_(ranks) {}
  int64_t ranks_;
};

// How sums of gradients are taken.
// `ordered`: sums are taken in rank order. The gradient norm is an exact sum that is rounded once, so it does not depend on
// where shards are cut.
// `canonical`: in addition, each microbatch's gradient is converted to 64-bit fixed point (multiples of 2^-44), so sums do not
// depend on any order. Every mesh, every strategy and every way to deal microbatches to ranks and rounds then gives the same
// bits. What one of n ranks adds to a sum must be below 2^18 / n in magnitude, else the backward throws Error. It needs a loss
// whose weights do not depend on the mesh (gradient_divide = 1, or by tokens).
// `fast`: sums are taken as the backend takes them, and norms are plain sums.
enum class Numerics { ordered, canonical, fast };

// Where the division of the summed gradient happens. The divisor in total is always the same.
enum class Divide {
  after,          // the sum is divided once
  before,         // each rank's term is divided before the sum
  split,          // terms are divided by a power of two near the divisor's square root, and the sum by the rest, as in FSDP, so
                  // that float16 neither overflows nor vanishes
  in_collective   // each reduction divides by the size of its group, in the dtype of the reduction, as NCCL's average does
};

enum class Granularity {
  element,  // shards may be cut at any element
  tensor,   // each parameter lies whole on one rank, as optimizers of matrices need it; offsets then depend on the mesh
  row  // each parameter is cut along one dim (`shard_dim`) in the pieces of torch.chunk, as FSDP2 cuts it: what a rank holds
       // of it is a tensor of whole rows, or of whole columns. What was gathered is copied once more, so that each parameter
       // lies in one piece
};

// What becomes of the memory of gathered parameters when a unit is resharded.
enum class Buffers {
  freed,  // it goes back to the allocator
  pooled  // it goes back to a pool of two buffers for each size; no gather ahead starts while both are in use
};

// How a rank gets the whole of sharded parameters.
enum class Gather {
  copied,       // an all-gather copies them into a buffer of the rank
  side_by_side  // the shards of all ranks lie beside each other in memory that the ranks share (Comm::shared_memory), so that
                // nothing is copied and nothing freed. An update then waits for the other ranks.
};

// When parameters that ranks update for each other must have arrived on all of them: those that the strategy keeps on more
// ranks than it updates them on.
enum class Publish {
  in_step,      // when the optimizer's step returns. Gathers of some buckets run while later ones are updated
  at_first_use  // when they are first used: by the next forward of their unit, by UnitHandle::unshard, and by every function
                // of the library that reads or writes parameters. Until then the module's own parameters have no data, and
                // reading them throws Error. Pieces must be got anew after each step. The destructor of Sharded waits for them
};

// Where the optimizer's memory is: main parameters, state, and final gradients. With any value but `none` it is in the host's
// memory, and the CPU updates it, as in ZeRO-Offload (Ren et al. 2021). The bits are the same, except for rules with matrix
// products (Muon), which a GPU rounds differently. Between steps the device holds only the parameters in the compute dtype.
// During a backward it holds the final gradients of at most two buckets, which are on their way to the host, instead of those
// of all buckets. Where ranks along tp hold terms of gradients, the gradients of all buckets stay on the device until the terms
// are added. The host holds everything else. Where compute and main dtype differ, it also holds a copy of the rank's `state`
// layout in the compute dtype.
enum class Offload {
  none,
  pinned,   // on CUDA it is page-locked, so copies run beside the device's work; elsewhere it is as `pageable`. LibTorch's
            // allocator of page-locked memory rounds each block up to a power of two and keeps freed blocks
  pageable  // it is plain memory, for hosts that cannot lock so much; copies from and to a GPU then block the host
};

// The options of one unit. An option that is not set is as ShardOptions says.
struct UnitOptions {
  std::optional<Reshard> reshard_after_forward = {};
  std::optional<Precision> precision = {};
  bool recompute = false;  // recomputes this unit, besides those that ShardOptions::recompute chooses
  bool offload_activations = false;  // likewise
  std::optional<Strategy> strategy = {};
  // Another mesh of the same ranks, which the unit's strategy then uses: e.g. dp_replicate=2,dp_shard=4 where the other units
  // have dp_shard=8. The unit's gradients must be summed over the same ranks as those of the others, and `tp` must be the same.
  std::optional<Mesh> mesh = {};
  // Replaces ShardOptions::gradient_divide.
  std::optional<double> gradient_divide = {};
};

struct ShardOptions {
  Strategy strategy = shardproof::strategy("zero3");

  // Chooses the units. Empty: the root is the only unit. Units may nest; a parameter belongs to the innermost unit around it.
  UnitSelector units = {};
  // Chooses parameters that stay plain tensors. They are not sharded, not reduced and not updated.
  ParameterSelector ignored = {};
  // Chooses units that keep no activations and compute them again in the backward (Chen et al. 2016, "Training Deep Nets with
  // Sublinear Memory Cost").
  UnitSelector recompute = {};
  // Chooses further modules that do the same and are no units: what they hold stays in the units around them, and no
  // collective changes. A model enters them through `call`. E.g. by_type<AttentionImpl>(), whose activations grow with the
  // square of a sequence and are cheap to compute (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large
  // Transformer Models"). Modules within a recomputed unit or module are not chosen again.
  UnitSelector recompute_modules = {};
  // Chooses units whose activations lie in the host's memory between their forward and their backward. They leave the device
  // while the next such unit computes, and come back while the backward of the next such unit runs, so the device holds those
  // of two units. In units that are recomputed as well these are the inputs. No bit changes. On CUDA the host's memory is
  // page-locked unless `offload` is `pageable`. On the CPU the copies are made and nothing is saved.
  UnitSelector offload_activations = {};

  // A unit's parameters go into one bucket, or into several buckets of at most `bucket_bytes_max` bytes each, or into
  // `bucket_count` buckets. 0: not set.
  int64_t bucket_bytes_max = 0;
  int64_t bucket_count = 0;
  // Every parameter starts at a multiple of so many bytes in its bucket. It must be a power of two and at least 64, because
  // vector kernels round differently at other offsets.
  int64_t alignment_bytes = 512;
  // The number of elements of every bucket is a multiple of this number, and of what even cuts need. The rest is padding, which
  // is zero. Megatron-LM's pad_buckets_for_high_nccl_busbw asks for 65,536: according to its documentation, NCCL's rings are
  // fast on many ranks only if each rank's part of a bucket is divisible by a large power of two. The values of parameters and
  // gradients do not depend on it.
  int64_t bucket_multiple = 1;
  Granularity granularity = Granularity::element;
  // The dim along which Granularity::row cuts; a parameter of fewer dims is cut along its last one. Other granularities ignore
  // it.
  int64_t shard_dim = 0;
  // Says it for each parameter instead, on every rank alike. A dim that the parameter does not have throws Error. Scalars are
  // not asked about.
  ParameterDim shard_dim_of = {};
  // Granularity::element cuts each parameter only at multiples of so many elements from its beginning, in row-major order, so
  // that blocks of that size stay whole: a block of shared scales, or a row. The last block may be shorter. A granule that a
  // parameter does not exceed keeps it whole. Every parameter still lies in one piece, the same memory is gathered and computed
  // with, and parts stay even: only offsets and padding grow (docs/layout.md). Other granularities refuse another value than 1.
  int64_t granule = 1;
  // Says it for each parameter instead, on every rank alike. Where tensor parallelism leaves ranks parts of several shapes, it
  // is asked about each of them on every rank, and their least common multiple holds for all, as all have the same offsets.
  // What is empty is not asked about. An answer below 1 throws Error.
  ParameterGranule granule_of = {};
  // Where the strategy shards parameters, those of at most so many elements stay whole on every rank between steps, in buckets
  // of their own. Their optimizer state stays sharded. 0: none do. This spares gathers of small parameters, as DeepSpeed's
  // stage3_param_persistence_threshold does.
  int64_t keep_whole_numel_max = 0;

  // It applies to all units but the root, which keeps its own parameters until its backward. Sharded::unit("") changes that.
  Reshard reshard_after_forward = Reshard::by_strategy();
  bool reshard_after_backward = true;
  Buffers buffers = Buffers::freed;
  Gather gather = Gather::copied;
  Offload offload = Offload::none;
  Publish publish = Publish::in_step;
  // How many units ahead are gathered while a unit runs. The order is that in which modules were registered, and its reverse in
  // the backward.
  int64_t prefetch_forward = 0;
  int64_t prefetch_backward = 0;
  // No gather ahead and no further reduction starts while more bytes than this are in flight. 0: gathers have no limit, and
  // reductions may have as many bytes in flight as two of the largest bucket's.
  int64_t bytes_in_flight_max = 0;
  // The gradient of a weight is made later than that of its layer's input: when the gather of the next unit has started, and at
  // the latest when the backward ends. Until then what it is made of is kept, the layer's input and the gradient of its output,
  // at most so many bytes at a time. A gradient that would need more is made at once. 0: all are. With it a unit's reduction
  // starts after the next unit's gather. No bit changes. It applies to the linear layers of this library (direct::linear), to
  // weights that the graph uses once and that have no hooks, and not within units with offload_activations. What is kept must
  // not be written in place before the backward ends, which throws Error.
  int64_t delayed_gradient_bytes_max = 0;

  Precision precision = {};
  // Returns the options of the unit of this name. Options that were given to Sharding::unit come first. Empty: no unit has
  // options of its own.
  std::function<UnitOptions(const std::string& unit)> unit_options = {};

  Numerics numerics = Numerics::ordered;
  // The summed gradient is divided by this number, once, however many axes it is summed over. 0: it is divided by the number of
  // ranks over which it is summed. This averages losses that are means over each rank's samples.
  double gradient_divide = 0;
  Divide divide = Divide::after;
  // When set, the summed gradient is instead divided by the number of tokens (at least 1) that all ranks reported with
  // Sharded::add_tokens in this step. Use it for losses that are sums over tokens.
  bool divide_by_tokens = false;
  // Whether gradients are summed over dp_replicate after every microbatch, instead of once after the last.
  bool reduce_replicas_every_microbatch = false;

  // Whether each rank's gradients are checked, as they are before the sum over ranks. The error of a NaN, an infinity or a
  // magnitude above `gradient_magnitude_max` names rank, step and parameter. On the CPU the backward throws it, on that rank
  // alone. Other ranks return from it with such a sum, or wait for that rank: let the error end it, which ends their waits. A
  // device keeps its answers, and the host does not wait for them in a backward. Whoever needs gradients next reads all of them
  // in one copy, together with what it asks itself: Optimizer::step, a norm, gradients_are_finite, gather_gradients, and those
  // of hand_over.h throw on every rank before any parameter changes, and Sharded::gradients throws on that rank alone. Set it
  // to false where a LossScaler handles such gradients.
  bool check_gradients = true;
  double gradient_magnitude_max = std::numeric_limits<double>::infinity();

  // The device that parameters of the meta device move to. Empty: that of the other parameters; when all are meta, the CPU.
  std::optional<c10::Device> device = {};
  // Whether all ranks start from rank 0's parameters and buffers.
  bool broadcast_initial_values = true;
  // Initializes the parameters of a model that was built under MetaInit (meta_init.h).
  Initializer initialize = {};
};

}  // namespace shardproof
