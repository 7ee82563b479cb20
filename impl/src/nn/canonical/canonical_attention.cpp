#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "nn/canonical/canonical_blocks.h"
#include "nn/canonical/fixed_point.h"
#include "shardproof/base/check.h"
#include "shardproof/nn/canonical/canonical.h"

// A query's output is the sum of exp(score - largest score) times value over the sum of these powers: both sums are exact, so
// keys may come in any order and from any rank, and so may queries in the sums for keys' gradients.
namespace shardproof::canonical_ops {
namespace {

using namespace canonical_blocks;
using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

std::vector<int64_t> all_positions(int64_t length) {
  std::vector<int64_t> positions;
  for (int64_t i = 0; i < length; ++i) positions.push_back(i);
  return positions;
}

struct Attend : torch::autograd::Function<Attend> {
  static Variable forward(AutogradContext* ctx, const Variable& given_q, const Variable& given_k, const Variable& given_v,
                          const std::vector<int64_t>& positions, bool causal, const std::string& name,
                          const c10::optional<Variable>& given_mask) {
    const at::Tensor mask = given_mask.value_or(at::Tensor());
    const at::Tensor q = fixed::require_double(given_q, name), k = fixed::require_double(given_k, name),
                     v = fixed::require_double(given_v, name);
    fixed::require_terms(std::max(k.size(2), q.size(3)), name);
    const std::vector<int64_t> keys = all_positions(k.size(2));
    fixed::Terms terms;
    at::Tensor shares = scores(q, k, {positions, keys, causal}, terms);
    raise(shares, largest(shares));
    Mixture mixture(q);
    mixture.add(shares, mask, v, terms);
    terms.require_fit(name);
    const at::Tensor output = mixture.output();
    ctx->save_for_backward({q, k, v, shares.div_(mixture.divisor()), mask, output});
    ctx->saved_data["name"] = name;
    ctx->saved_data["positions"] = positions;
    ctx->saved_data["causal"] = causal;
    return output;
  }

  static variable_list backward(AutogradContext* ctx, variable_list dys) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2], &shares = saved[3], &mask = saved[4], &output = saved[5];
    const std::string what = ctx->saved_data["name"].toStringRef() + ", gradients";
    fixed::require_terms(q.size(2) * (q.size(1) / k.size(1)), what);
    const std::vector<int64_t> positions = ctx->saved_data["positions"].toIntVector(), keys = all_positions(k.size(2));
    Gradients gradients(q, dys[0].contiguous(), output);
    const at::TensorOptions integers = k.options().dtype(at::kLong);
    const at::Tensor of_keys = at::zeros(k.sizes(), integers), of_values = at::zeros(v.sizes(), integers);
    fixed::Terms terms;
    gradients.add(k, v, shares, mask, {positions, keys, ctx->saved_data["causal"].toBool()}, of_keys, of_values, terms);
    terms.require_fit(what);
    return {
        fixed::from_units(gradients.of_queries()), fixed::from_units(of_keys), fixed::from_units(of_values), {}, {}, {}, {}};
  }
};

}  // namespace

at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::vector<int64_t>& positions,
                     bool causal, const std::string& name, const at::Tensor& mask) {
  SHARD_REQUIRE(q.dim() == 4 && k.dim() == 4 && k.sizes() == v.sizes() && q.size(0) == k.size(0) && q.size(3) == k.size(3) &&
                    k.size(1) > 0 && q.size(1) % k.size(1) == 0 && std::ssize(positions) == q.size(2),
                "canonical", "{}: q {} at {} positions, k {} and v {} do not fit", name, fmt::join(q.sizes(), "x"),
                positions.size(), fmt::join(k.sizes(), "x"), fmt::join(v.sizes(), "x"));
  for (const int64_t position : positions)
    SHARD_REQUIRE(!causal || (position >= 0 && position < k.size(2)), "canonical", "{}: a query at position {} of {}", name,
                  position, k.size(2));
  const std::vector<int64_t> of_mask = {q.size(0), q.size(1), q.size(2), k.size(2)};
  SHARD_REQUIRE(!mask.defined() || mask.sizes() == of_mask, "canonical", "{}: a mask of sizes {} for scores of {}", name,
                fmt::join(mask.sizes(), "x"), fmt::join(of_mask, "x"));
  const auto factors = mask.defined() ? c10::make_optional(fixed::require_double(mask, name)) : c10::nullopt;
  return Attend::apply(q, k, v, positions, causal, name, factors);
}

}  // namespace shardproof::canonical_ops
