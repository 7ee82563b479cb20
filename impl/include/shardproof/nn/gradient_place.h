// Products whose weight's gradient is made where it is summed over ranks, so that nothing has to copy it there. That of
// `linear` may also be made later than its backward comes by (ShardOptions::delayed_gradient_bytes_max).
//
// They give the same bits as at::linear and at::embedding. They are those where the weight is no parameter of a sharded
// module, and under autocast. A gradient that has to be added to another one, or converted, is made elsewhere and copied.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>

#include <cstdint>

namespace shardproof {

// What a parameter has whose gradient somebody takes over after every backward. It is private to the library.
class GradientTaker : public torch::autograd::PostAccumulateGradHook {
 public:
  // Returns memory of the parameter's sizes in which its gradient of this backward may be made. It holds anything, and then is
  // what autograd passes on. Returns an undefined tensor where the gradient must be made elsewhere: when this is asked a second
  // time in one backward, and where the gradient is one of several terms or takes another dtype.
  virtual at::Tensor place() = 0;
  // Returns true if it keeps dy and x and makes the gradient dy^T x itself, before the backward ends. Then autograd gets none.
  virtual bool delay(const at::Tensor& dy, const at::Tensor& x) = 0;
};

namespace direct {

// Where the gradient of this weight may be made, as above. Undefined in a backward that keeps a graph of itself, or that is for
// chosen tensors only, and where the weight has hooks of its own, which may keep the gradient.
at::Tensor place_of_gradient(const at::Tensor& weight);

// dy^T x, for matrices dy [n, out] and x [n, in]: the gradient of a weight [out, in], in its place if it has one.
at::Tensor weight_gradient(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight);

// Whether the weight's gradient dy^T x is made later, and the backward passes on none. That is so where the options of
// fully_shard allow it, and where the graph uses the weight once, so that autograd has nothing to add to it.
bool is_delayed(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight);

// x [.., in], weight [out, in], and bias [out] or undefined -> [.., out].
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

// tokens [..], weight [rows, n] -> [.., n]. Row `padding` gets no gradient; -1: there is no such row.
at::Tensor embedding(const at::Tensor& weight, const at::Tensor& tokens, int64_t padding = -1);

}  // namespace direct
}  // namespace shardproof
