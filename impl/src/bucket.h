// The memory of one bucket: parameters of one unit, one dtype, one requires-grad state, in one flat buffer that modules see
// views of. The bucket also holds the gradients, whose accumulation over microbatches is a state of the bucket:
//
//   empty -> produced (local terms, added over microbatches if the strategy reduces late)
//         -> accumulated (reduced over ranks, added over microbatches if the strategy reduces early)
//         -> final (in the state layout, divided; what the optimizer reads)
//
// Buffers by name: `compute` the whole bucket, which parameters are views of; `parameter` what rests between steps (part of
// the same memory unless the strategy shards it); `produced`, `accumulated`, `gradient` as above, the last three one memory
// where the layouts are equal.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "bucket_layout.h"
#include "shardproof/mesh_comm.h"
#include "shardproof/shard_options.h"

namespace shardproof {

class Bucket {
 public:
  // Copies the parameters' values into the buffer and turns the parameters into views of it. When `broadcast`, rank 0's
  // values along the strategy's partial axes win. Collective.
  Bucket(std::vector<at::Tensor> parameters, BucketLayout layout, std::shared_ptr<MeshComm> comms, const ShardOptions& options);

  const BucketLayout& layout() const { return layout_; }
  bool trainable() const { return trainable_; }

  // The whole bucket, gathered. `start` allocates and returns at once.
  void start_unshard();
  void finish_unshard();
  // Releases the memory of `compute` while autograd keeps aliases of it, and makes the module's parameters unreadable;
  // nothing where the strategy keeps them whole.
  void reshard();
  bool frees_compute() const { return layout_.unshard().step != Step::none; }

  // Takes over one parameter's gradient of this microbatch.
  void add_gradient(int64_t slot, const at::Tensor& gradient);
  // Every parameter's gradient of this microbatch is there.
  bool complete() const { return arrived_count_ == static_cast<int64_t>(arrived_.size()); }
  // Parameters that the backward did not reach have zero gradients.
  void fill_missing();

  // Reduces this microbatch; `last` brings the gradient to its final form. `finish` may be called later, once.
  void start_reduce(bool last, const std::string& where);
  void finish_reduce();

  bool final() const { return gradient_.defined(); }
  const at::Tensor& gradient() const { return gradient_; }
  // The part of the parameters that the optimizer updates, the same memory as `parameter` or a slice of it.
  at::Tensor state_parameter() const;
  const at::Tensor& parameter() const { return parameter_; }
  const std::vector<at::Tensor>& views() const { return views_; }

  void zero_gradients();
  // After the optimizer wrote state_parameter(): brings `parameter` up to date on every rank.
  void publish();

 private:
  void check_padding(const LocalView& view, const at::Tensor& local, const char* what) const;
  void check_finite(const std::string& where) const;
  void finalize();
  void point_parameters_at(const std::vector<at::Tensor>& data);
  at::Tensor allocate(int64_t numel) const;

  BucketLayout layout_;
  std::shared_ptr<MeshComm> comms_;
  double divide_;
  bool trainable_;
  std::vector<at::Tensor> views_;       // the module's parameters
  std::vector<at::Tensor> readable_;    // what they are while the bucket is whole: views of compute_
  std::vector<at::Tensor> unreadable_;  // what they are while it is not
  Work unshard_work_;
  at::Tensor compute_, parameter_;

  std::vector<bool> arrived_;
  int64_t arrived_count_ = 0;
  bool produced_has_values_ = false;
  bool reducing_ = false;
  bool reducing_last_ = false;
  Work reduce_work_;
  at::Tensor produced_, reduced_, accumulated_, gradient_;
};

}  // namespace shardproof
