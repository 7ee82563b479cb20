// Dropout whose mask depends on where an element lies in the whole tensor, whatever part of the tensor a rank has. So under
// tensor, sequence, context and data parallelism, and in recomputation, the masks are those of the unsharded model.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <memory>
#include <vector>

#include "shardproof/nn/canonical/canonical.h"
#include "shardproof/nn/random.h"

namespace shardproof {

// How one kind of parallelism cuts the tensors that a module sees. `parallelize` and `context_parallel` set it.
class RowPlacement {
 public:
  virtual ~RowPlacement() = default;
  // Replaces the rank's row indices in the cut dims of `dims` by indices in the dims as they are before this cut.
  virtual void to_whole(std::vector<DimRows>& dims) const = 0;
};

// A module that has to know where its rows lie in the whole tensor.
class PlacementAware {
 public:
  // Tensor parallelism cuts what context parallelism leaves. Null: the tensor is not cut by it.
  std::shared_ptr<const RowPlacement> tensor_placement, context_placement;

 protected:
  ~PlacementAware() = default;
  // The rows that a tensor of these sizes has of each dim of the whole tensor. Dim 0 is the batch.
  std::vector<DimRows> rows_in_whole(at::IntArrayRef sizes) const;
};

// Dropout of a tensor [batch, ..]. The module has no parameters. Where tensor parallelism cuts its input, it needs a style:
// SequenceParallel when the sequence is cut, else CutDropout.
class DropoutImpl : public torch::nn::Module, public PlacementAware, public CanonicalPart {
 public:
  explicit DropoutImpl(double probability) : probability_(probability) {}
  at::Tensor forward(at::Tensor x);
  double probability() const { return probability_; }

 private:
  double probability_;
};
TORCH_MODULE(Dropout);

}  // namespace shardproof
