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

// How one kind of parallelism cuts what a module sees. `dims` holds a rank's rows within what the rank has before that cut, and
// gets them within what there is before it. Given by `parallelize` and `context_parallel`.
class RowPlacement {
 public:
  virtual ~RowPlacement() = default;
  virtual void widen(std::vector<DimRows>& dims) const = 0;
};

// A module that has to know.
class Placed {
 public:
  // Tensor parallelism cuts what context parallelism left.
  std::shared_ptr<const RowPlacement> tensor_placement, context_placement;

 protected:
  ~Placed() = default;
  // Of a tensor of these sizes, whose dim 0 is the batch.
  std::vector<DimRows> place_of(at::IntArrayRef sizes) const;
};

// Dropout of a tensor [batch, ..]. The module has no parameters. Where tensor parallelism cuts its input, it needs a style:
// SequenceParallel when the sequence is cut, else CutDropout.
class DropoutImpl : public torch::nn::Module, public Placed, public CanonicalPart {
 public:
  explicit DropoutImpl(double probability) : probability_(probability) {}
  at::Tensor forward(at::Tensor x);
  double probability() const { return probability_; }

 private:
  double probability_;
};
TORCH_MODULE(Dropout);

}  // namespace shardproof
