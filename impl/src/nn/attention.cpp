#include "shardproof/nn/attention.h"

#include <ATen/ATen.h>

#include <cmath>

#include "shardproof/base/check.h"
#include "shardproof/nn/dropout_mask.h"

namespace shardproof {
namespace {

// A key head in every place of the query heads that it serves.
at::Tensor repeated(const at::Tensor& x, int64_t heads) {
  return x.size(1) == heads ? x : x.repeat_interleave(heads / x.size(1), 1);
}

at::Tensor causal_mask(int64_t length) {
  return at::ones({length, length}, at::kBool).tril();
}

}  // namespace

at::Tensor PositionsImpl::forward(int64_t length) {
  if (!rule) return at::arange(length, at::kLong);
  return at::tensor(rule->positions(length), at::kLong);
}

at::Tensor masked_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& allowed,
                            const std::optional<AttentionDropout>& dropout, const DimRows& q_positions,
                            const DimRows& k_positions) {
  const at::Tensor keys = repeated(k, q.size(1)), values = repeated(v, q.size(1));
  // Attention without a mask uses this kernel too, so both round alike. It rounds less often than the steps below.
  if (!dropout)
    return at::scaled_dot_product_attention(q, keys, values, allowed.defined() ? std::optional(allowed) : std::nullopt);
  at::Tensor scores = at::matmul(q / std::sqrt(static_cast<double>(q.size(-1))), keys.transpose(-2, -1));
  if (allowed.defined()) scores = scores.masked_fill(allowed.logical_not(), -INFINITY);
  const at::Tensor probabilities = at::softmax(scores, -1);
  const at::Tensor kept = dropout_mask(dropout->site, {dropout->samples, dropout->heads, q_positions, k_positions},
                                       probabilities.scalar_type(), probabilities.device());
  return at::matmul(probabilities * kept, values);
}

at::Tensor AttentionImpl::forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  SHARD_REQUIRE(q.dim() == 4 && k.sizes() == v.sizes() && k.dim() == 4 && k.size(1) > 0 && q.size(1) % k.size(1) == 0,
                "attention", "needs q [B, heads, T, head] and k, v of a divisor of the heads, got {}, {} and {}",
                fmt::join(q.sizes(), "x"), fmt::join(k.sizes(), "x"), fmt::join(v.sizes(), "x"));
  std::optional<AttentionDropout> dropout;
  if (is_training() && dropout_ > 0) {
    const std::vector<DimRows> place = rows_in_whole({q.size(0), q.size(1)});
    dropout = {next_dropout_site(dropout_), place[0], place[1]};
  }
  if (is_canonical()) return canonically(q, k, v, dropout);
  if (rule) return rule->attend(q, k, v, causal_, dropout);
  if (!dropout) return at::scaled_dot_product_attention(q, repeated(k, q.size(1)), repeated(v, q.size(1)), {}, 0.0, causal_);
  const DimRows positions = whole_rows(q.size(2));
  const at::Tensor allowed = causal_ ? causal_mask(q.size(2)).to(q.device()) : at::Tensor();
  return masked_attention(q, k, v, allowed, dropout, positions, positions);
}

at::Tensor AttentionImpl::canonically(const at::Tensor& q, const at::Tensor& given_k, const at::Tensor& given_v,
                                      const std::optional<AttentionDropout>& dropout) {
  const auto [k, v] = copied_keys ? copied_keys->summing(given_k, given_v, canonical_name()) : std::pair(given_k, given_v);
  if (rule) return rule->attend_canonically(q, k, v, causal_, dropout, canonical_name());
  const DimRows positions = whole_rows(q.size(2));
  at::Tensor mask;
  if (dropout)
    mask = dropout_mask(dropout->site, {dropout->samples, dropout->heads, positions, positions}, at::kDouble, q.device());
  return canonical_ops::attention(q, k, v, positions.rows, causal_, canonical_name(), mask);
}

}  // namespace shardproof
