#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>
#include <limits>

#include "nn/canonical/fixed_point.h"
#include "shardproof/algebra/layout.h"
#include "shardproof/base/check.h"
#include "shardproof/nn/canonical/canonical.h"

namespace shardproof::canonical_ops {
namespace {

using fixed::grid;
using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

constexpr int64_t kIgnored = -100;
constexpr const char* kName = "cross_entropy";

// [2, rows]: each row's sum of powers and its target's logit, both over the largest logit, of this rank's entries.
at::Tensor sums_of(const at::Tensor& logits, const at::Tensor& targets, const at::Tensor& most, int64_t first) {
  const int64_t rows = logits.size(0), own = logits.size(1);
  at::Tensor sums = at::zeros({2, rows}, at::kLong);
  int64_t* sum = sums.mutable_data_ptr<int64_t>();
  fixed::Terms terms;
  for (int64_t i = 0; i < rows; ++i) {
    uint64_t total = 0;
    for (int64_t j = 0; j < own; ++j) {
      const double shifted = logits.const_data_ptr<double>()[i * own + j] - most.const_data_ptr<double>()[i];
      total += terms.units(std::exp(shifted));
      if (first + j == targets.const_data_ptr<int64_t>()[i]) sum[rows + i] = terms.exact_units(shifted);
    }
    sum[i] = static_cast<int64_t>(total);
  }
  terms.require_fit(kName);
  return sums;
}

struct CrossEntropy : torch::autograd::Function<CrossEntropy> {
  static Variable forward(AutogradContext* ctx, const Variable& given, const at::Tensor& given_targets, int64_t first,
                          Comm* group) {
    const at::Tensor logits = fixed::require_host(given, kName).reshape({given_targets.numel(), given.size(-1)});
    const at::Tensor targets = given_targets.reshape({-1}).contiguous();
    at::Tensor most = logits.size(1) > 0 ? logits.amax({1})
                                         : at::full({logits.size(0)}, -std::numeric_limits<double>::infinity(), at::kDouble);
    if (group) group->all_reduce(most, Reduce::max).wait();
    at::Tensor sums = sums_of(logits, targets, most, first);
    if (group) group->all_reduce(sums, Reduce::sum).wait();
    ctx->save_for_backward({logits, targets, most, sums});
    ctx->saved_data["first"] = first;
    ctx->saved_data["sizes"] = given.sizes().vec();

    const int64_t rows = logits.size(0);
    fixed::require_terms(rows, kName);
    fixed::Terms terms;
    uint64_t loss = 0;
    for (int64_t i = 0; i < rows; ++i) {
      if (targets.const_data_ptr<int64_t>()[i] == kIgnored) continue;
      const auto sum = [&](int64_t row) { return fixed::value(static_cast<uint64_t>(sums.const_data_ptr<int64_t>()[row])); };
      loss += terms.units(std::log(sum(i)) - sum(rows + i));
    }
    terms.require_fit(kName);
    return at::full({}, fixed::value(loss), at::kDouble);
  }

  static variable_list backward(AutogradContext* ctx, variable_list dy) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &logits = saved[0], &targets = saved[1], &most = saved[2], &sums = saved[3];
    const int64_t rows = logits.size(0), own = logits.size(1), first = ctx->saved_data["first"].toInt();
    const double factor = dy[0].item<double>();
    at::Tensor gradient = at::zeros(logits.sizes(), logits.options());
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t target = targets.const_data_ptr<int64_t>()[i];
      if (target == kIgnored) continue;
      const double sum = fixed::value(static_cast<uint64_t>(sums.const_data_ptr<int64_t>()[i]));
      for (int64_t j = 0; j < own; ++j) {
        const double share = std::exp(logits.const_data_ptr<double>()[i * own + j] - most.const_data_ptr<double>()[i]) / sum;
        gradient.mutable_data_ptr<double>()[i * own + j] = grid(factor * (share - (first + j == target ? 1 : 0)));
      }
    }
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
