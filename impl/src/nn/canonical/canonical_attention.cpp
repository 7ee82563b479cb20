#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

#include "internal/nn/canonical/canonical_blocks.h"
#include "internal/nn/canonical/fixed_point.h"
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

// Some heads of a sample, or all of all samples.
struct Heads {
  bool all = true;
  int64_t sample = 0, head = 0, count = 0, of = 0;

  // Their part of x [B, heads, ..], or that of the keys' heads [B, kv_heads, ..] which serve them.
  at::Tensor operator()(const at::Tensor& x) const {
    if (all || !x.defined()) return x;
    const int64_t served = of / x.size(1);
    return x.narrow(0, sample, 1).narrow(1, head / served, std::max<int64_t>(1, count / served));
  }
  Sight operator()(Sight sight) const {
    const bool apart = !all && sight.hidden.defined() && sight.hidden.size(0) > 1;
    if (apart) sight.hidden = sight.hidden.narrow(0, sample, 1);
    return sight;
  }
};

// Calls f(heads) for so few heads at a time that their matrices of queries by keys stay in a core's cache from one operation to
// the next, if one does. Heads that share a head of keys are taken together or one by one. A device takes all at once.
template <class F>
void by_heads(const at::Tensor& q, const at::Tensor& k, const F& f) {
  constexpr int64_t kCached = 1 << 16;  // doubles
  const int64_t samples = q.size(0), heads = q.size(1), matrix = q.size(2) * k.size(2), served = heads / k.size(1);
  if (!q.is_cpu() || samples * heads * matrix <= kCached) return f(Heads{});
  const int64_t fit = kCached / matrix, count = fit < served ? 1 : std::min(heads, fit / served * served);
  for (int64_t sample = 0; sample < samples; ++sample)
    for (int64_t head = 0; head < heads; head += count)
      f(Heads{.all = false, .sample = sample, .head = head, .count = std::min(count, heads - head), .of = heads});
}

struct Attend : torch::autograd::Function<Attend> {
  static Variable forward(AutogradContext* ctx, const Variable& given_q, const Variable& given_k, const Variable& given_v,
                          const std::vector<int64_t>& positions, bool causal, const std::string& name,
                          const c10::optional<Variable>& given_mask, const c10::optional<Variable>& hidden) {
    const at::Tensor mask = given_mask.value_or(at::Tensor());
    const at::Tensor q = fixed::require_double(given_q, name), k = fixed::require_double(given_k, name),
                     v = fixed::require_double(given_v, name);
    fixed::require_terms(std::max(k.size(2), q.size(3)), name);
    const std::vector<int64_t> keys = all_positions(k.size(2));
    fixed::Terms terms;
    const Sight sight(positions, keys, causal, q.device(), hidden.value_or(at::Tensor()));
    const at::Tensor all_shares = at::empty({q.size(0), q.size(1), q.size(2), k.size(2)}, q.options());
    Mixture mixture(q);
    by_heads(q, k, [&](const Heads& heads) {
      const at::Tensor shares = heads(all_shares);
      write_scores(heads(q), heads(k), heads(sight), shares, terms);
      raise(shares, largest(shares), sight);
      Mixture own = mixture.part(heads);
      own.add(shares, heads(mask), heads(v), sight, terms);
      shares.div_(own.divisor());
    });
    terms.require_fit(name);
    const at::Tensor output = mixture.output();
    ctx->save_for_backward({q, k, v, all_shares, mask, output});
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
    const at::TensorOptions integers = k.options().dtype(at::kLong);
    const at::Tensor of_keys = at::zeros(k.sizes(), integers), of_values = at::zeros(v.sizes(), integers);
    Gradients gradients(q, dys[0].contiguous(), output);
    fixed::Terms terms;
    const Sight sight(positions, keys, ctx->saved_data["causal"].toBool(), q.device());  // what else is hidden has no share
    at::Tensor room;  // that all heads use in turn, since new pages are slow
    by_heads(q, k, [&](const Heads& heads) {
      const at::Tensor own_shares = heads(shares);
      if (!room.defined()) room = at::empty(own_shares.sizes(), shares.options());
      Gradients own = gradients.part(heads);
      own.add(heads(k), heads(v), own_shares, heads(mask), sight, heads(of_keys), heads(of_values), terms,
              room.narrow(1, 0, own_shares.size(1)));
    });
    terms.require_fit(what);
    return {fixed::from_units(gradients.of_queries()),
            fixed::from_units(of_keys),
            fixed::from_units(of_values),
            {},
            {},
            {},
            {},
            {}};
  }
};

}  // namespace

at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::vector<int64_t>& positions,
                     bool causal, const std::string& name, const at::Tensor& mask, const at::Tensor& hidden) {
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
  const auto besides = hidden.defined() ? c10::make_optional(hidden) : c10::nullopt;
  return Attend::apply(q, k, v, positions, causal, name, factors, besides);
}

}  // namespace shardproof::canonical_ops
