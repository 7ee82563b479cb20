// Arithmetic inside of a model that no cut can change: not by tensor, sequence or context parallelism, not by microbatch.
//
//   Gpt model(options);
//   use_canonical_arithmetic(*model);                                 // first
//   TensorParallel parallel = parallelize(model.ptr(), comms, gpt_plan(options));
//   ContextParallel context = context_parallel(model.ptr(), comms);
//   Sharded sharded = fully_shard(model.ptr(), comms, {.precision = {.main = at::kFloat, .compute = at::kDouble},
//                                                      .numerics = Numerics::canonical, .gradient_divide = 1});
//   loss = canonical_ops::cross_entropy(call(model, tokens), targets, options.vocab, &comms->along({"tp"}));
//
// Then parameters, gradients, norms, optimizer state and losses have the same bits on every mesh. How: sums that a cut can
// split (products over features, sums over rows and positions for weights, softmax over keys or the vocabulary, sums over
// ranks) round each term to a multiple of 2^-40 and add integers, so their order does not matter; sums within a token's
// features, which nothing cuts, go by index; all else is one float64 operation an element. Terms of 128 or more and sums of
// more than 65,535 terms are errors that name the tensor, NonFiniteError and Error, on every mesh alike. Everything is in
// float64.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <string>
#include <vector>

#include "shardproof/comm/comm.h"

namespace shardproof {

// A module that can compute so.
class CanonicalPart {
 public:
  virtual ~CanonicalPart() = default;
  bool is_canonical() const { return !canonical_name_.empty(); }
  const std::string& canonical_name() const { return canonical_name_; }
  void use_canonical(std::string name) { canonical_name_ = std::move(name); }

 private:
  std::string canonical_name_;  // for messages
};

// Switches the module and all below it. Throws Error, naming it, when one has parameters and is no CanonicalPart.
void use_canonical_arithmetic(torch::nn::Module& root);
// Whether anything below the module was switched.
bool uses_canonical_arithmetic(const torch::nn::Module& root);

// The operations, for modules of your own; `name` is for messages. Inputs are float64. Differentiable once.
namespace canonical_ops {

// To a multiple of 2^-40, forward and backward.
at::Tensor round(const at::Tensor& x);
at::Tensor relu(const at::Tensor& x);
at::Tensor tanh(const at::Tensor& x);
at::Tensor gelu(const at::Tensor& x);  // of the erf form
at::Tensor silu(const at::Tensor& x);

// x times the mask, of equal sizes, rounded: see dropout_mask.
at::Tensor dropout(const at::Tensor& x, const at::Tensor& mask);

// x [.., in], weight [out, in], bias [out] or undefined.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, const std::string& name);
// x [.., n] + bias of the sizes of x's last dims; rounded.
at::Tensor add_bias(const at::Tensor& x, const at::Tensor& bias, const std::string& name);
// Rows of the weight; zeros for tokens below 0 or beyond the last row.
at::Tensor embedding(const at::Tensor& weight, const at::Tensor& tokens, const std::string& name);
// Over the last dim.
at::Tensor layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, double eps,
                      const std::string& name);
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, const std::string& name);
// q [B, heads, Tq, head] at those positions, k and v [B, kv_heads, T, head] of all positions. A causal query sees no key beyond
// its position. `mask`: of dropout, [B, heads, Tq, T], which multiplies the probabilities; undefined for none.
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::vector<int64_t>& positions,
                     bool causal, const std::string& name, const at::Tensor& mask = {});
// The sum over the targets that are not -100 of the cross entropy of logits [.., own entries], of `entries` in all, which are
// cut evenly over the group; null: they are whole. Collective.
at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets, int64_t entries, Comm* group = nullptr);
// The sum of the squares of the differences.
at::Tensor squared_error(const at::Tensor& output, const at::Tensor& target);

}  // namespace canonical_ops
}  // namespace shardproof
