#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "fixed_point.h"
#include "shardproof/canonical.h"
#include "shardproof/check.h"

// A query's output is the sum of exp(score - largest score) times value over the sum of these powers: both sums are exact, so
// keys may come in any order and from any rank, and so may queries in the sums for keys' gradients.
namespace shardproof::canonical_ops {
namespace {

using fixed::grid;
using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

// The tensors of one attention as plain arrays [B, heads, rows, width].
struct Sizes {
  int64_t batch, heads, kv_heads, queries, keys, width;
  Sizes(const at::Tensor& q, const at::Tensor& k)
      : batch(q.size(0)), heads(q.size(1)), kv_heads(k.size(1)), queries(q.size(2)), keys(k.size(2)), width(q.size(3)) {}
  int64_t query_row(int64_t b, int64_t h, int64_t i) const { return (b * heads + h) * queries + i; }
  int64_t key_row(int64_t b, int64_t h, int64_t j) const { return (b * kv_heads + h / (heads / kv_heads)) * keys + j; }
  double scale() const { return 1 / std::sqrt(static_cast<double>(width)); }
};

double dot(const double* a, const double* b, int64_t count, fixed::Terms& terms) {
  uint64_t sum = 0;
  for (int64_t d = 0; d < count; ++d) sum += terms.units(a[d] * b[d]);
  return fixed::value(sum);
}

struct Attend : torch::autograd::Function<Attend> {
  static Variable forward(AutogradContext* ctx, const Variable& given_q, const Variable& given_k, const Variable& given_v,
                          const std::vector<int64_t>& positions, bool causal, const std::string& name) {
    const at::Tensor q = fixed::require_double(given_q, name), k = fixed::require_double(given_k, name),
                     v = fixed::require_double(given_v, name);
    const Sizes s(q, k);
    fixed::require_terms(std::max(s.keys, s.width), name);
    const double *qs = q.const_data_ptr<double>(), *ks = k.const_data_ptr<double>(), *vs = v.const_data_ptr<double>();
    at::Tensor shares = at::zeros({s.batch, s.heads, s.queries, s.keys}, q.options());  // what the backward needs
    at::Tensor output = at::empty(q.sizes(), q.options());
    fixed::Terms terms;
    std::vector<uint64_t> sums(static_cast<size_t>(s.width));
    for (int64_t b = 0; b < s.batch; ++b)
      for (int64_t h = 0; h < s.heads; ++h)
        for (int64_t i = 0; i < s.queries; ++i) {
          const int64_t row = s.query_row(b, h, i), seen = causal ? positions[static_cast<size_t>(i)] + 1 : s.keys;
          double* powers = shares.mutable_data_ptr<double>() + row * s.keys;
          double most = -std::numeric_limits<double>::infinity();
          for (int64_t j = 0; j < seen; ++j) {
            powers[j] = dot(qs + row * s.width, ks + s.key_row(b, h, j) * s.width, s.width, terms) * s.scale();
            most = std::max(most, powers[j]);
          }
          uint64_t total = 0;
          std::fill(sums.begin(), sums.end(), 0);
          for (int64_t j = 0; j < seen; ++j) {
            powers[j] = std::exp(powers[j] - most);
            total += terms.units(powers[j]);
            const double* value = vs + s.key_row(b, h, j) * s.width;
            for (int64_t d = 0; d < s.width; ++d) sums[static_cast<size_t>(d)] += terms.units(powers[j] * value[d]);
          }
          const double divisor = fixed::value(total);
          for (int64_t j = 0; j < seen; ++j) powers[j] /= divisor;
          for (int64_t d = 0; d < s.width; ++d)
            output.mutable_data_ptr<double>()[row * s.width + d] = grid(fixed::value(sums[static_cast<size_t>(d)]) / divisor);
        }
    terms.require_fit(name);
    ctx->save_for_backward({q, k, v, shares, output});
    ctx->saved_data["name"] = name;
    return output;
  }

  static variable_list backward(AutogradContext* ctx, variable_list dys) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2], &shares = saved[3], &output = saved[4];
    const at::Tensor dy = dys[0].contiguous();
    const std::string what = ctx->saved_data["name"].toStringRef() + ", gradients";
    const Sizes s(q, k);
    fixed::require_terms(s.queries * (s.heads / s.kv_heads), what);
    const double *qs = q.const_data_ptr<double>(), *ks = k.const_data_ptr<double>(), *vs = v.const_data_ptr<double>();
    std::vector<uint64_t> q_sums(static_cast<size_t>(q.numel())), k_sums(static_cast<size_t>(k.numel())), v_sums(k_sums);
    fixed::Terms terms;
    for (int64_t b = 0; b < s.batch; ++b)
      for (int64_t h = 0; h < s.heads; ++h)
        for (int64_t i = 0; i < s.queries; ++i) {
          const int64_t row = s.query_row(b, h, i);
          const double *above = dy.const_data_ptr<double>() + row * s.width,
                       *own = output.const_data_ptr<double>() + row * s.width;
          double along = 0;
          for (int64_t d = 0; d < s.width; ++d) along += above[d] * own[d];
          for (int64_t j = 0; j < s.keys; ++j) {
            const double share = shares.const_data_ptr<double>()[row * s.keys + j];
            if (share == 0) continue;
            const int64_t key = s.key_row(b, h, j) * s.width;
            const double score = share * (dot(above, vs + key, s.width, terms) - along) * s.scale();
            for (int64_t d = 0; d < s.width; ++d) {
              q_sums[static_cast<size_t>(row * s.width + d)] += terms.units(score * ks[key + d]);
              k_sums[static_cast<size_t>(key + d)] += terms.units(score * qs[row * s.width + d]);
              v_sums[static_cast<size_t>(key + d)] += terms.units(share * above[d]);
            }
          }
        }
    terms.require_fit(what);
    const auto total = [](const std::vector<uint64_t>& sums, const at::Tensor& like) {
      at::Tensor result = at::empty(like.sizes(), like.options());
      for (int64_t i = 0; i < result.numel(); ++i)
        result.mutable_data_ptr<double>()[i] = fixed::value(sums[static_cast<size_t>(i)]);
      return result;
    };
    return {total(q_sums, q), total(k_sums, k), total(v_sums, v), {}, {}, {}};
  }
};

}  // namespace

at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::vector<int64_t>& positions,
                     bool causal, const std::string& name) {
  SHARD_REQUIRE(q.dim() == 4 && k.dim() == 4 && k.sizes() == v.sizes() && q.size(0) == k.size(0) && q.size(3) == k.size(3) &&
                    k.size(1) > 0 && q.size(1) % k.size(1) == 0 && std::ssize(positions) == q.size(2),
                "canonical", "{}: q {} at {} positions, k {} and v {} do not fit", name, fmt::join(q.sizes(), "x"),
                positions.size(), fmt::join(k.sizes(), "x"), fmt::join(v.sizes(), "x"));
  for (const int64_t position : positions)
    SHARD_REQUIRE(!causal || position < k.size(2), "canonical", "{}: a query at position {} of {}", name, position, k.size(2));
  return Attend::apply(q, k, v, positions, causal, name);
}

}  // namespace shardproof::canonical_ops
