#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>
#include <limits>

#include "internal/nn/canonical/fixed_point.h"
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

// exp(logit - largest of its row), divided by the divisor of its row if there is one: of this rank's entries [rows, own].
at::Tensor powers(const at::Tensor& logits, const at::Tensor& most, const at::Tensor& divisor = {}) {
  at::Tensor result = at::empty(logits.sizes(), logits.options());
  model_math(device_math(logits))
      .row_powers(logits.const_data_ptr<double>(), most.const_data_ptr<double>(),
                  divisor.defined() ? divisor.const_data_ptr<double>() : nullptr, {}, logits.size(0), logits.size(1),
                  result.mutable_data_ptr<double>());
  return result;
}

// Where the target of each row lies in this rank's entries. A row whose target another rank has takes entry 0, and has no own.
struct Targets {
  at::Tensor own, columns;  // [rows, 1]
  Targets(const at::Tensor& targets, int64_t first, int64_t entries) {
    const at::Tensor place = (targets - first).unsqueeze(1);
    own = place.ge(0).logical_and(place.lt(entries));
    columns = at::where(own, place, 0);
  }
};

at::Tensor natural_log(const at::Tensor& x) {
  at::Tensor result = at::empty(x.sizes(), x.options());
  model_math(device_math(x)).log(x.const_data_ptr<double>(), x.numel(), result.mutable_data_ptr<double>());
  return result;
}

// [rows]: the logit of each row's target, over the largest one; 0 where another rank has it.
at::Tensor at_targets(const at::Tensor& logits, const at::Tensor& targets, const at::Tensor& most, int64_t first) {
  if (logits.size(1) == 0) return at::zeros(targets.sizes(), logits.options());
  const Targets places(targets, first, logits.size(1));
  return at::where(places.own, logits.gather(1, places.columns) - most.unsqueeze(1), 0.0).squeeze(1);
}

// [2, rows], in units: each row's sum of powers, and the logit of its target, of this rank's entries.
at::Tensor sums_of(const at::Tensor& logits, const at::Tensor& targets, const at::Tensor& most, int64_t first) {
  const at::Tensor terms = powers(logits, most), sums = at::zeros({logits.size(0)}, targets.options());
  fixed::add_row_sums(sums, terms, 1);  // no power is above 1
  return at::stack({sums, fixed::to_units(at_targets(logits, targets, most, first), kName)});
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
    fixed::Terms finite;  // the same on all ranks
    finite.note(std::isfinite(fixed::largest_magnitude(most)));
    finite.require_fit(kName);
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
    at::Tensor gradient = powers(logits, most, fixed::from_units(sums[0]));
    if (logits.size(1) > 0) {
      const Targets places(targets, first, logits.size(1));
      gradient.scatter_(1, places.columns, gradient.gather(1, places.columns).sub_(places.own.to(at::kDouble)));
    }
    double* data = gradient.mul_(dy[0]).mutable_data_ptr<double>();
    model_math(device_math(gradient)).grid(data, gradient.numel(), data);
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
