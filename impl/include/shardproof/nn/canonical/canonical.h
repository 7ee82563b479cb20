// Canonical arithmetic inside a model: results that neither tensor, sequence or context parallelism nor the cut into
// microbatches can change.
//
//   Gpt model(options);
//   use_canonical_arithmetic(*model);                                 // first
//   TensorParallel parallel = parallelize(model.ptr(), comms, gpt_plan(options));
//   ContextParallel context = context_parallel(model.ptr(), comms);
//   Sharded sharded = fully_shard(model.ptr(), comms, {.precision = {.main = at::kFloat, .compute = at::kDouble},
//                                                      .numerics = Numerics::canonical, .gradient_divide = 1});
//   loss = canonical_ops::cross_entropy(call(model, tokens), targets, options.vocab, &comms->along({"tp"}));
//
// Parameters, gradients, norms, optimizer state and losses then have the same bits on every mesh. It works like this. Some sums
// can be split by a cut: products over features, sums over rows and positions for weights, softmax over keys or over the
// vocabulary, and sums over ranks. These round each term to a multiple of 2^-40 and add integers, so their order does not
// matter. Sums over the features of one token are never split, and are taken in the order of indices. Everything else is one
// float64 operation for each element. A term of magnitude 128 or more throws NonFiniteError, and a sum of more than 65,535
// terms throws Error; both name the tensor, and both happen on every mesh alike. All tensors are float64. docs/canonical.md
// explains the rules.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <string>
#include <vector>

#include "shardproof/comm/comm.h"

namespace shardproof {

// A module that can use canonical arithmetic.
class CanonicalPart {
 public:
  virtual ~CanonicalPart() = default;
  bool is_canonical() const { return !canonical_name_.empty(); }
  const std::string& canonical_name() const { return canonical_name_; }
  void use_canonical(std::string name) { canonical_name_ = std::move(name); }

 private:
  std::string canonical_name_;  // appears in messages; empty: the module uses plain arithmetic
};

// Switches the module and all modules below it to canonical arithmetic. Throws Error, which names the module, when one has
// parameters and is not a CanonicalPart.
void use_canonical_arithmetic(torch::nn::Module& root);
// Whether the module or any module below it was switched.
bool uses_canonical_arithmetic(const torch::nn::Module& root);

// The operations, for modules of your own. Inputs are float64. Each can be differentiated once. `name` appears in messages.
namespace canonical_ops {

// Rounds to multiples of 2^-40, and rounds the gradient in the same way in the backward.
at::Tensor round(const at::Tensor& x);
at::Tensor relu(const at::Tensor& x);
at::Tensor tanh(const at::Tensor& x);
at::Tensor gelu(const at::Tensor& x);  // the exact form, with erf
at::Tensor silu(const at::Tensor& x);

// x times a mask of the same sizes, rounded; see dropout_mask (random.h).
at::Tensor dropout(const at::Tensor& x, const at::Tensor& mask);

// x [.., in], weight [out, in], bias [out] or undefined -> [.., out].
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, const std::string& name);
// x plus the bias, whose sizes are those of x's last dims; rounded.
at::Tensor add_bias(const at::Tensor& x, const at::Tensor& bias, const std::string& name);
// tokens [..] -> rows of the weight [rows, hidden] as [.., hidden]. A token that is below 0 or beyond the last row gives zeros.
at::Tensor embedding(const at::Tensor& weight, const at::Tensor& tokens, const std::string& name);
// Norms over the last dim; weight and bias have its size.
at::Tensor layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, double eps,
                      const std::string& name);
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, const std::string& name);
// Attention of q [B, heads, Tq, head], which lies at `positions`, to k and v [B, kv_heads, T, head] of all positions. When
// `causal`, a query sees no key beyond its position. `mask` [B, heads, Tq, T] is a dropout mask that multiplies the
// probabilities; undefined: there is no dropout. `hidden` says which keys are hidden besides, bool [1 or B, 1, Tq, T].
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::vector<int64_t>& positions,
                     bool causal, const std::string& name, const at::Tensor& mask = {}, const at::Tensor& hidden = {});
// Cross entropy of logits [.., own entries] and targets [..], summed over the targets that are not -100. The `entries` of the
// vocabulary are cut evenly over the group; when `group` is null, the logits have all of them. Collective over the group.
at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets, int64_t entries, Comm* group = nullptr);
// Of rows of numbers, which each rank has whole: their softmax over the last dim, their sigmoids, and each number divided by
// the sum of its row and `more`. Neither they nor their gradients are rounded; `round` does that.
at::Tensor softmax(const at::Tensor& x);
at::Tensor sigmoid(const at::Tensor& x);
at::Tensor shares(const at::Tensor& x, double more);
// The logarithm of the sum of the exponentials of each such row. Neither it nor its gradient is rounded.
at::Tensor log_sum_exp(const at::Tensor& x);
// The sum of such rows, 0-dim, for losses: first of each by index, then of the rows, each rounded. Its gradient is not rounded.
// `name` appears in messages.
at::Tensor sum(const at::Tensor& x, const std::string& name);
// The sum of rows [.., count, n] times weights [.., count] -> [.., n].
at::Tensor mixture(const at::Tensor& rows, const at::Tensor& weights);
// The sum of the squared differences.
at::Tensor squared_error(const at::Tensor& output, const at::Tensor& target);

}  // namespace canonical_ops
}  // namespace shardproof
