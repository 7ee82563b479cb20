// The memory of one bucket: parameters of one unit, one dtype, one requires-grad state at first, in one flat buffer that
// modules see views of. The bucket also holds the gradients, whose accumulation over microbatches is a state of the bucket:
//
//   empty -> produced (local terms, added over the microbatches since the last reduction)
//         -> accumulated (reduced over ranks, added over reductions, where the strategy reduces early)
//         -> final (in the state layout and the main dtype, divided; what the optimizer reads)
//
// Buffers by name: `compute` the whole bucket, which parameters are views of; `parameter` what rests between steps (part of
// the same memory unless the strategy shards it); `main` what the optimizer updates (part of `parameter` unless its dtype
// or place differs); `rounded` the same in the compute dtype; `kept` what stays of `compute` between forward and backward where
// that is neither all nor nothing. With Offload, main, rounded and the final gradient are in the host's memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "device/host_transfers.h"
#include "sharding/bucket_layout.h"
#include "sharding/memory_ledger.h"
#include "sharding/reduction.h"
#include "shardproof/comm/mesh_comm.h"
#include "shardproof/sharding/shard_options.h"

namespace shardproof {

// What a bucket does with numbers; `resolve` fills in what options leave open.
struct BucketRules {
  at::ScalarType compute = at::kFloat, main = at::kFloat;
  ReductionDtypes reduction;
  double divide_before = 1, divide_after = 1;
  bool check_gradients = true;
  double gradient_magnitude_max = 0;
  bool broadcast = true;
  Gather gather = Gather::copied;
  bool offload = false;
  int64_t parallel_terms = 1;  // so many neighbours along the tensor-parallel axis hold terms of the gradients
  std::vector<std::string> sum_axes;  // along which gradients are partial
};

// `stored` is the dtype of the module's parameters. Throws Error where the options contradict each other.
BucketRules resolve(const ShardOptions& options, const Precision& precision, const Strategy& strategy, const Mesh& mesh,
                    at::ScalarType stored);

class Bucket {
 public:
  // Copies the parameters' values into the buffers, or fills those of meta parameters, and turns the parameters into views.
  // When rules.broadcast, rank 0's values along the axes of the sum win. Collective. `transfers` serve all buckets of a rank.
  Bucket(std::vector<at::Tensor> parameters, BucketLayout layout, std::shared_ptr<MeshComm> comms,
         std::shared_ptr<MemoryLedger> memory, std::shared_ptr<HostTransfers> transfers, BucketRules rules,
         const Initializer& initialize);

  const BucketLayout& layout() const { return layout_; }
  const BucketRules& rules() const { return rules_; }
  const std::vector<at::Tensor>& views() const { return views_; }  // the module's parameters

  // What its calls are for, in a backend's errors and records.
  void set_label(std::string label) { label_ = std::move(label); }

  // Before main() is written: waits until no rank reads the parameters of this step any more. Collective.
  void begin_update();

  // The whole bucket, gathered. `start` allocates and returns at once.
  void start_unshard();
  void finish_unshard();
  // Releases the memory of `compute` while autograd keeps aliases of it, and makes the module's parameters unreadable;
  // nothing where the strategy keeps them whole.
  void reshard();
  // The same, but groups of `ranks` neighbours along dp_shard keep the parameters between them until the next gather.
  void reshard_within(int64_t ranks);
  bool frees_compute() const { return layout_.unshard().step != Step::none && !side_by_side(); }
  // Parameters are sharded, and whole all the time.
  bool side_by_side() const { return layout_.unshard().step != Step::none && rules_.gather == Gather::side_by_side; }
  int64_t compute_bytes() const;

  // Whether any parameter requires a gradient now; they may be frozen and thawed between steps, the same on every rank.
  bool trainable() const;
  // Whether every one does. Otherwise the backward may still read parameters when all gradients have arrived.
  bool all_train() const;
  bool trains(int64_t slot) const { return views_[slot].requires_grad(); }

  // A backward begins: which gradients will come, and whether they are reduced at its end.
  void begin_backward(bool reduces);
  // Takes over one parameter's gradient. When it may be a part of what this backward makes, parts are added first, as autograd
  // adds them, and wait for `settle`.
  void add_gradient(int64_t slot, const at::Tensor& gradient, bool may_be_part);
  // All parts are there.
  void settle();
  // Every gradient of this backward is there.
  bool complete() const { return missing_ == 0; }
  // Parameters that the backward did not reach have zero gradients.
  void fill_missing();

  // Reduces what was added; `last` brings the gradient to its final form. `finish` may be called later, once. `where` is for
  // messages.
  void start_reduce(bool last, const std::string& where);
  void finish_reduce();
  bool reducing() const { return reduction_.has_value() || local_; }
  int64_t bytes_in_flight() const { return reduction_ ? reduction_->bytes_in_flight() : 0; }

  bool final() const { return gradient_.defined(); }
  // In the state layout and the main dtype, divided by everything but what `divide_final` still adds. Offloaded, it waits until
  // the gradient is in the host's memory; one whose terms are still to be added is on the device.
  const at::Tensor& gradient() const;
  void divide_final(double divisor);
  // Adds up what the ranks of the group have of the final gradient: terms along the tensor-parallel axis. Collective.
  void sum_terms(Comm& group);

  const at::Tensor& parameter() const { return parameter_; }
  // To be written, too. Offloaded, it waits until the device has the values from before.
  const at::Tensor& main() const;
  // Where main() in the compute dtype goes.
  const at::Tensor& rounded() const { return rounded_; }
  // Memory for the optimizer's state of so many elements, where main() is.
  at::Tensor allocate_state(int64_t numel) const;

  void zero_gradients();
  // After main() was written: brings `parameter` up to date on every rank. `is_rounded`: rounded() is up to date already.
  void publish(bool is_rounded = false);

 private:
  at::TensorOptions options(at::ScalarType dtype) const;  // where the bucket is
  void allocate_parameters();
  void allocate_main();
  Place place() const { return rules_.offload ? Place::host : Place::device; }  // of what the optimizer works on
  at::Tensor own_part() const;  // the state's part of `parameter`
  void fill_from_values();
  void fill_from_initializer(const Initializer& initialize);
  at::ScalarType produced_dtype(bool reduces) const;
  void take(int64_t slot, const at::Tensor& gradient);
  void check_padding(const LocalView& view, const at::Tensor& local, const char* what) const;
  void check_produced(const std::string& where) const;
  void finalize(at::Tensor sum);
  void start_offload();
  void point_parameters_at(const std::vector<at::Tensor>& data);

  std::string label_;
  BucketLayout layout_;
  std::shared_ptr<MeshComm> comms_;
  std::shared_ptr<MemoryLedger> memory_;
  std::shared_ptr<HostTransfers> transfers_;
  BucketRules rules_;
  std::vector<at::Tensor> views_;
  std::vector<at::Tensor> readable_;    // what they are while the bucket is whole: views of compute_
  std::vector<at::Tensor> unreadable_;  // what they are while it is not
  Work unshard_work_;
  at::Tensor compute_, parameter_, main_, rounded_, kept_;
  HostTransfer upload_;  // of parameters, to the device
  int64_t kept_ranks_ = 0;
  bool neighbours_write_ = true;  // side by side: no collective since parameters were written

  std::vector<bool> arrived_;  // in this backward
  std::vector<bool> holds_;    // produced_ has a value, of this or an earlier backward
  std::vector<at::Tensor> parts_;  // sums of parts that are not settled; undefined where there are none
  int64_t missing_ = 0;
  bool suspicious_ = false;  // produced_ holds something that is not finite or too large
  std::string unrepresentable_;  // the first parameter whose gradient fixed-point numbers cannot hold
  bool reduces_ = true;
  bool local_ = false;       // "reducing" without a collective
  bool last_ = false;
  at::Tensor produced_, accumulated_, gradient_;
  HostTransfer download_;  // of the gradient
  at::Tensor fixed_;  // the final gradient in fixed point, while terms of it are to be added
  std::optional<Reduction> reduction_;
};

}  // namespace shardproof
