#include "nn/canonical/canonical_blocks.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace shardproof::canonical_blocks {
namespace {

constexpr double kHidden = -std::numeric_limits<double>::infinity();

// The tensors of a block as plain arrays of rows.
struct Sizes {
  int64_t batch, heads, kv_heads, queries, keys, width;
  Sizes(const at::Tensor& q, const at::Tensor& k)
      : batch(q.size(0)), heads(q.size(1)), kv_heads(k.size(1)), queries(q.size(2)), keys(k.size(2)), width(q.size(3)) {}
  double scale() const { return 1 / std::sqrt(static_cast<double>(width)); }

  // f(query's row, its place, the first row of its keys), for every sample and head.
  template <class F>
  void each_query(const F& f) const {
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t i = 0; i < queries; ++i)
          f((b * heads + h) * queries + i, i, (b * kv_heads + h / (heads / kv_heads)) * keys);
  }
};

double dot(const double* a, const double* b, int64_t count, fixed::Terms& terms) {
  uint64_t sum = 0;
  for (int64_t d = 0; d < count; ++d) sum += terms.units(a[d] * b[d]);
  return fixed::value(sum);
}

// Integers are added modulo 2^64. Each loop below notes terms that are out of range in a copy of its own, which can stay in a
// register: the one that it is given might be among the sums, for all that the compiler knows.
uint64_t* units_in(const at::Tensor& sums) {
  return reinterpret_cast<uint64_t*>(sums.mutable_data_ptr<int64_t>());
}

}  // namespace

int64_t Places::seen(int64_t query) const {
  if (!causal) return std::ssize(keys);
  return std::upper_bound(keys.begin(), keys.end(), queries[static_cast<size_t>(query)]) - keys.begin();
}

at::Tensor scores(const at::Tensor& q, const at::Tensor& k, const Places& places, fixed::Terms& found) {
  fixed::Terms terms = found;
  const Sizes s(q, k);
  at::Tensor result = at::full({s.batch, s.heads, s.queries, s.keys}, kHidden, q.options());
  const double *qs = q.const_data_ptr<double>(), *ks = k.const_data_ptr<double>(), scale = s.scale();
  double* to = result.mutable_data_ptr<double>();
  s.each_query([&](int64_t row, int64_t i, int64_t first) {
    for (int64_t j = 0, seen = places.seen(i); j < seen; ++j)
      to[row * s.keys + j] = dot(qs + row * s.width, ks + (first + j) * s.width, s.width, terms) * scale;
  });
  found = terms;
  return result;
}

at::Tensor largest(const at::Tensor& scores) {
  if (scores.size(-1) > 0) return scores.amax({-1});
  return at::full(scores.sizes().slice(0, 3), kHidden, scores.options());
}

at::Tensor powers(const at::Tensor& scores, const at::Tensor& most) {
  at::Tensor result = at::empty(scores.sizes(), scores.options());
  const double *from = scores.const_data_ptr<double>(), *tops = most.const_data_ptr<double>();
  double* to = result.mutable_data_ptr<double>();
  for (int64_t row = 0, keys = scores.size(-1); row < most.numel(); ++row)
    for (int64_t j = row * keys; j < (row + 1) * keys; ++j) to[j] = from[j] == kHidden ? 0 : std::exp(from[j] - tops[row]);
  return result;
}

Mixture::Mixture(const at::Tensor& q)
    : mixed_(at::zeros(q.sizes(), at::kLong)), total_(at::zeros(q.sizes().slice(0, 3), at::kLong)) {}

void Mixture::add(const at::Tensor& powers, const at::Tensor& mask, const at::Tensor& v, fixed::Terms& found) {
  fixed::Terms terms = found;
  const Sizes s(mixed_, v);
  const double *weights = powers.const_data_ptr<double>(), *values = v.const_data_ptr<double>();
  const double* kept = mask.defined() ? mask.const_data_ptr<double>() : nullptr;
  uint64_t *mixed = units_in(mixed_), *total = units_in(total_);
  s.each_query([&](int64_t row, int64_t, int64_t first) {
    uint64_t* sums = mixed + row * s.width;
    for (int64_t j = 0; j < s.keys; ++j) {
      const double power = weights[row * s.keys + j];
      if (power == 0) continue;  // adds nothing
      total[row] += terms.units(power);
      const double weight = kept ? kept[row * s.keys + j] * power : power;
      const double* value = values + (first + j) * s.width;
      for (int64_t d = 0; d < s.width; ++d) sums[d] += terms.units(weight * value[d]);
    }
  });
  found = terms;
}

at::Tensor Mixture::divisor() const {
  return fixed::from_units(total_).unsqueeze(-1);
}

at::Tensor Mixture::output() const {
  at::Tensor result = fixed::from_units(mixed_);
  const at::Tensor divisors = divisor();
  double* to = result.mutable_data_ptr<double>();
  const int64_t width = result.size(-1);
  for (int64_t i = 0; i < result.numel(); ++i) to[i] = fixed::grid(to[i] / divisors.const_data_ptr<double>()[i / width]);
  return result;
}

Gradients::Gradients(const at::Tensor& q, const at::Tensor& dy, const at::Tensor& output)
    : q_(q), dy_(dy), along_(at::zeros(q.sizes().slice(0, 3), q.options())), of_queries_(at::zeros(q.sizes(), at::kLong)) {
  double* along = along_.mutable_data_ptr<double>();
  const double *above = dy.const_data_ptr<double>(), *own = output.const_data_ptr<double>();
  for (int64_t i = 0, width = q.size(-1); i < q.numel(); ++i) along[i / width] += above[i] * own[i];
}

void Gradients::add(const at::Tensor& k, const at::Tensor& v, const at::Tensor& shares, const at::Tensor& mask,
                    const Places& places, at::Tensor of_keys, at::Tensor of_values, fixed::Terms& found) {
  fixed::Terms terms = found;
  const Sizes s(q_, k);
  const double *qs = q_.const_data_ptr<double>(), *ks = k.const_data_ptr<double>(), *vs = v.const_data_ptr<double>();
  const double *dys = dy_.const_data_ptr<double>(), *along = along_.const_data_ptr<double>(), scale = s.scale();
  const double* kept = mask.defined() ? mask.const_data_ptr<double>() : nullptr;
  uint64_t *q_sums = units_in(of_queries_), *k_sums = units_in(of_keys), *v_sums = units_in(of_values);
  s.each_query([&](int64_t row, int64_t i, int64_t first) {
    const double *query = qs + row * s.width, *above = dys + row * s.width;
    for (int64_t j = 0, seen = places.seen(i); j < seen; ++j) {
      const double share = shares.const_data_ptr<double>()[row * s.keys + j], m = kept ? kept[row * s.keys + j] : 1;
      const int64_t key = (first + j) * s.width;
      const double score = share * (m * dot(above, vs + key, s.width, terms) - along[row]) * scale, kept_share = share * m;
      for (int64_t d = 0; d < s.width; ++d) q_sums[row * s.width + d] += terms.units(score * ks[key + d]);
      for (int64_t d = 0; d < s.width; ++d) k_sums[key + d] += terms.units(score * query[d]);
      for (int64_t d = 0; d < s.width; ++d) v_sums[key + d] += terms.units(kept_share * above[d]);
    }
  });
  found = terms;
}

}  // namespace shardproof::canonical_blocks
