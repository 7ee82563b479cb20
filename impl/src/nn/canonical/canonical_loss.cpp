#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <limits>

#include "nn/canonical/fixed_point.h"
#include "shardproof/algebra/layout.h"
#include "shardproof/base/check.h"
#include "shardproof/device/device.h"
#include "shardproof/device/model_math.h"
#include "shardproof/nn/canonical/canonical.h"

namespace shardproof::canonical_ops {
namespace {

using fixed::grid;
using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

constexpr int64_t kIgnored = -100;
constexpr const char* kName = "cross_entropy";

// Logits over the largest of their row, and their powers, of this rank's entries [rows, own].
at::Tensor shifted(const at::Tensor& logits, const at::Tensor& most) {
  return logits - most.unsqueeze(1);
}
at::Tensor powers(const at::Tensor& logits, const at::Tensor& most) {
  at::Tensor result = shifted(logits, most);
  double* data = result.mutable_data_ptr<double>();
  model_math(device_math(result)).exp(data, result.numel(), data);
  return result;
}

at::Tensor natural_log(const at::Tensor& x) {
  at::Tensor result = at::empty(x.sizes(), x.options());
  model_math(device_math(x)).log(x.const_data_ptr<double>(), x.numel(), result.mutable_data_ptr<double>());
  return result;
}

// [rows]: the logit of each row's target, over the largest one; 0 where another rank has it.
at::Tensor at_targets(const at::Tensor& logits, const at::Tensor& targets, const at::Tensor& most, int64_t first) {
  if (logits.size(1) == 0) return at::zeros(targets.sizes(), logits.options());
  const at::Tensor place = targets - first, own = place.ge(0).logical_and(place.lt(logits.size(1)));
  const at::Tensor columns = at::where(own, place, 0).unsqueeze(1);
  return at::where(own, shifted(logits, most).gather(1, columns).squeeze(1), 0.0);
}

// [2, rows], in units: each row's sum of powers, and the logit of its target, of this rank's entries.
at::Tensor sums_of(const at::Tensor& logits, const at::Tensor& targets, const at::Tensor& most, int64_t first) {
  const at::Tensor terms = powers(logits, most), ones = at::ones({logits.size(1), 1}, logits.options());
  at::Tensor sums = at::zeros({logits.size(0), 1}, targets.options());
  const bool fit = model_math(device_math(terms))
                       .exact_product({.a = terms.const_data_ptr<double>(),
                                       .b = ones.const_data_ptr<double>(),
                                       .rows = logits.size(0),
                                       .inner = logits.size(1),
                                       .columns = 1,
                                       .units = sums.mutable_data_ptr<int64_t>()},
                                      /*check=*/true);
  fixed::Terms found;
  found.note(fit);
  found.require_fit(kName);
  return at::stack({sums.squeeze(1), fixed::to_units(at_targets(logits, targets, most, first), kName)});
}

struct CrossEntropy : torch::autograd::Function<CrossEntropy> {
  static Variable forward(AutogradContext* ctx, const Variable& given, const at::Tensor& given_targets, int64_t first,
                          Comm* group) {
    const at::Tensor logits = fixed::require_double(given, kName).reshape({given_targets.numel(), given.size(-1)});
    const at::Tensor targets = given_targets.reshape({-1}).contiguous();
    at::Tensor most = logits.size(1) > 0
                          ? logits.amax({1})
                          : at::full({logits.size(0)}, -std::numeric_limits<double>::infinity(), logits.options());
    if (group) group->all_reduce(most, Reduce::max).wait();
    at::Tensor sums = sums_of(logits, targets, most, first);
    if (group) group->all_reduce(sums, Reduce::sum).wait();
    ctx->save_for_backward({logits, targets, most, sums});
    ctx->saved_data["first"] = first;
    ctx->saved_data["sizes"] = given.sizes().vec();
    const at::Tensor terms = natural_log(fixed::from_units(sums[0])) - fixed::from_units(sums[1]);
    return fixed::sum_of_rows(at::where(targets.eq(kIgnored), 0.0, terms).unsqueeze(1), kName).squeeze(0);
  }

  static variable_list backward(AutogradContext* ctx, variable_list dy) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &logits = saved[0], &targets = saved[1], &most = saved[2], &sums = saved[3];
    const int64_t first = ctx->saved_data["first"].toInt();
    const at::Tensor entries = at::arange(first, first + logits.size(1), targets.options());
    const at::Tensor hits = entries.unsqueeze(0).eq(targets.unsqueeze(1)).to(at::kDouble);
    const at::Tensor shares = powers(logits, most).div_(fixed::from_units(sums[0]).unsqueeze(1));
    at::Tensor gradient = fixed::grid(shares.sub_(hits).mul_(dy[0]));
    gradient.masked_fill_(targets.eq(kIgnored).unsqueeze(1), 0.0);
    return {gradient.view(ctx->saved_data["sizes"].toIntVector()), {}, {}, {}};
  }
};

}  // namespace

at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& targets, int64_t entries, Comm* group) {
  const Interval own = group ? piece({}, entries, group->size(), group->rank()) : Interval{0, entries};
  SHARD_REQUIRE(
      logits.dim() >= 1 && logits.size(-1) == own.size() && logits.sizes().slice(0, logits.dim() - 1) == targets.sizes(),
      "canonical", "cross_entropy: expected logits [.., {}] of {} entries beside targets [..], got {} and {}", own.size(),
      entries, fmt::join(logits.sizes(), "x"), fmt::join(targets.sizes(), "x"));
  const at::Tensor wrong = (targets != kIgnored).logical_and((targets < 0).logical_or(targets >= entries));
  SHARD_REQUIRE(!wrong.any().item<bool>(), "canonical",
                "cross_entropy: a target is outside of the {} entries and not the ignored {}", entries, kIgnored);
  return CrossEntropy::apply(logits, targets, own.begin, group && group->size() > 1 ? group : nullptr);
}

}  // namespace shardproof::canonical_ops
