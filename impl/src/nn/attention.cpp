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

}  // namespace

AttentionSight::AttentionSight(bool is_causal, int64_t of_window) : causal(is_causal), window(of_window) {
  SHARD_REQUIRE(window >= 0 && (causal || window == 0), "attention",
                "a window of {} keys: it must not be below 0, and only causal attention has one", window);
}

void AttentionSight::require_fit(int64_t samples, int64_t length) const {
  if (!documents.defined()) return;
  SHARD_REQUIRE(documents.dim() == 2 && documents.size(0) == samples && documents.size(1) == length &&
                    documents.scalar_type() == at::kLong,
                "attention",
                "documents of {} sequences of {} positions must be int64 {}x{}, got {} {}. They are of whole "
                "sequences, also where a rank has a part of each; the module Documents gives them",
                samples, length, samples, length, c10::toString(documents.scalar_type()), fmt::join(documents.sizes(), "x"));
}

at::Tensor AttentionSight::hidden(const at::Tensor& queries, const at::Tensor& keys) const {
  const at::Tensor of_queries = queries.unsqueeze(1), of_keys = keys.unsqueeze(0);
  at::Tensor result;
  const auto hide = [&](const at::Tensor& mask) { result = result.defined() ? result | mask : mask; };
  if (causal) hide((of_keys > of_queries).unsqueeze(0));
  if (window > 0) hide((of_keys <= of_queries - window).unsqueeze(0));
  if (documents.defined()) {
    const at::Tensor numbers = documents.to(queries.device());
    hide(numbers.index_select(1, queries).unsqueeze(2) != numbers.index_select(1, keys).unsqueeze(1));
  }
  return result.defined() ? result.unsqueeze(1) : result;
}

at::Tensor PositionsImpl::forward(int64_t length) {
  if (!rule) return at::arange(length, at::kLong);
  return at::tensor(rule->positions(length), at::kLong);
}

at::Tensor AttentionSight::hidden_besides(const std::vector<int64_t>& queries, const std::vector<int64_t>& keys, int64_t length,
                                          c10::Device device) const {
  const auto there = [&](const std::vector<int64_t>& positions) { return at::tensor(positions, at::kLong).to(device); };
  return sees_all_before(length) ? at::Tensor() : hidden(there(queries), there(keys));
}

// A document begins behind the end of the one before.
at::Tensor DocumentsImpl::forward(const at::Tensor& tokens) {
  const at::Tensor ends = (rule ? rule->whole(tokens) : tokens).eq(end_).to(at::kLong);
  return ends.cumsum(1) - ends;
}

at::Tensor masked_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& hidden,
                            const std::optional<AttentionDropout>& dropout, const DimRows& q_positions,
                            const DimRows& k_positions) {
  const at::Tensor keys = repeated(k, q.size(1)), values = repeated(v, q.size(1));
  // Attention without a mask uses this kernel too, so both round alike. It rounds less often than the steps below.
  if (!dropout)
    return at::scaled_dot_product_attention(q, keys, values,
                                            hidden.defined() ? std::optional(hidden.logical_not()) : std::nullopt);
  at::Tensor scores = at::matmul(q / std::sqrt(static_cast<double>(q.size(-1))), keys.transpose(-2, -1));
  if (hidden.defined()) scores = scores.masked_fill(hidden, -INFINITY);
  const at::Tensor probabilities = at::softmax(scores, -1);
  const at::Tensor kept = dropout_mask(dropout->site, {dropout->samples, dropout->heads, q_positions, k_positions},
                                       probabilities.scalar_type(), probabilities.device());
  return at::matmul(probabilities * kept, values);
}

at::Tensor whole_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionSight& sight,
                           const std::optional<AttentionDropout>& dropout) {
  if (!dropout && sight.sees_all_before(q.size(2)))
    return at::scaled_dot_product_attention(q, repeated(k, q.size(1)), repeated(v, q.size(1)), {}, 0.0, sight.causal);
  const DimRows rows = whole_rows(q.size(2));
  const at::Tensor positions = at::arange(q.size(2), q.options().dtype(at::kLong));
  return masked_attention(q, k, v, sight.hidden(positions, positions), dropout, rows, rows);
}

at::Tensor canonical_whole_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const AttentionSight& sight,
                                     const std::optional<AttentionDropout>& dropout, const std::string& name) {
  const DimRows positions = whole_rows(q.size(2));
  at::Tensor mask;
  if (dropout)
    mask = dropout_mask(dropout->site, {dropout->samples, dropout->heads, positions, positions}, at::kDouble, q.device());
  return canonical_ops::attention(q, k, v, positions.rows, sight.causal, name, mask,
                                  sight.hidden_besides(positions.rows, positions.rows, q.size(2), q.device()));
}

at::Tensor AttentionImpl::forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& documents) {
  SHARD_REQUIRE(q.dim() == 4 && k.sizes() == v.sizes() && k.dim() == 4 && k.size(1) > 0 && q.size(1) % k.size(1) == 0,
                "attention", "needs q [B, heads, T, head] and k, v of a divisor of the heads, got {}, {} and {}",
                fmt::join(q.sizes(), "x"), fmt::join(k.sizes(), "x"), fmt::join(v.sizes(), "x"));
  AttentionSight sight = sight_;
  if (documents.defined()) sight.documents = documents;
  sight.require_fit(q.size(0), rule && sight.documents.defined() ? rule->length(q.size(2)) : q.size(2));
  std::optional<AttentionDropout> dropout;
  if (is_training() && dropout_ > 0) {
    const std::vector<DimRows> place = rows_in_whole({q.size(0), q.size(1)});
    dropout = {next_dropout_site(dropout_), place[0], place[1]};
  }
  if (is_canonical()) return canonically(q, k, v, sight, dropout);
  return rule ? rule->attend(q, k, v, sight, dropout) : whole_attention(q, k, v, sight, dropout);
}

at::Tensor AttentionImpl::canonically(const at::Tensor& q, const at::Tensor& given_k, const at::Tensor& given_v,
                                      const AttentionSight& sight, const std::optional<AttentionDropout>& dropout) {
  const auto [k, v] = copied_keys ? copied_keys->summing(given_k, given_v, canonical_name()) : std::pair(given_k, given_v);
  if (rule) return rule->attend_canonically(q, k, v, sight, dropout, canonical_name());
  return canonical_whole_attention(q, k, v, sight, dropout, canonical_name());
}

}  // namespace shardproof
