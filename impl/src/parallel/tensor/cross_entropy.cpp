#include "shardproof/parallel/tensor/cross_entropy.h"

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>
#include <ATen/autocast_mode.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <limits>

#include "internal/device/matrix.h"
#include "shardproof/algebra/layout.h"
#include "shardproof/base/check.h"
#include "shardproof/base/dtypes.h"
#include "shardproof/nn/gradient_place.h"

namespace shardproof {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

constexpr double kInfinity = std::numeric_limits<double>::infinity(), kNan = std::numeric_limits<double>::quiet_NaN();

// This rank's entries of a vocabulary, and how the loss takes them.
struct Entries {
  int64_t first = 0, own = 0;
  int64_t real = 0;     // of its own: the others are padding
  int64_t vocab = 0;    // of all ranks, without padding
  int64_t at_most = 0;  // what a rank has at most
  double smoothing = 0;
  int64_t ignored = 0;
  Comm* group = nullptr;  // null: this rank has all
};

// The losses of tokens whose logits are [tokens, real], in float32 or wider. The logits become the gradient of the losses' sum.
// Two reductions tell all ranks what they need of each other.
at::Tensor take_losses(at::Tensor logits, const at::Tensor& targets, const Entries& e) {
  at::Tensor most = e.real > 0 ? logits.amax({1}) : at::full({targets.numel()}, -kInfinity, logits.options());
  if (e.group) e.group->all_reduce(most, Reduce::max).wait();
  logits.sub_(most.unsqueeze(1));
  const at::Tensor counts = targets != e.ignored, local = targets - e.first;
  const at::Tensor here = counts.logical_and(local >= 0).logical_and(local < e.real);
  const at::Tensor index = at::where(here, local, 0).unsqueeze(1);
  const at::Tensor picked =
      e.real > 0 ? at::where(here, logits.gather(1, index).squeeze(1), 0) : at::zeros_like(most);
  const at::Tensor spread = e.smoothing > 0 ? logits.sum(1) : at::zeros_like(most);
  at::Tensor sums = at::stack({logits.exp_().sum(1), picked, spread});  // each a term of the sum over the vocabulary
  if (e.group) e.group->all_reduce(sums).wait();
  const at::Tensor is_wrong = counts.logical_and((targets < 0).logical_or(targets >= e.vocab));
  const at::Tensor sum = at::where(is_wrong, kNan, sums[0]);
  at::Tensor losses = sum.log() - sums[1];
  if (e.smoothing > 0)
    losses = losses * (1 - e.smoothing) + (sum.log() - sums[2] / static_cast<double>(e.vocab)) * e.smoothing;

  logits.div_(at::where(counts, sum, kInfinity).unsqueeze(1));
  const at::Tensor counted = counts.to(logits.scalar_type()).unsqueeze(1);
  if (e.smoothing > 0) logits.sub_(counted * (e.smoothing / static_cast<double>(e.vocab)));
  if (e.real > 0) logits.scatter_add_(1, index, here.to(logits.scalar_type()).mul(e.smoothing - 1).unsqueeze(1));
  return at::where(counts, losses, 0);
}

// How many targets count, 0-dim. No host waits for it.
at::Tensor count_of(const at::Tensor& targets, const Entries& e, at::ScalarType dtype) {
  return (targets != e.ignored).sum().to(dtype);
}

struct CutCrossEntropy : torch::autograd::Function<CutCrossEntropy> {
  static Variable forward(AutogradContext* ctx, const Variable& given, const Variable& targets, const Entries& e, bool mean) {
    // Logits of smaller dtypes are taken as float32: float16 does not hold the sum of a vocabulary.
    at::Tensor gradient = rows_of(given).narrow(1, 0, e.real).to(at::toOpMathType(given.scalar_type()), false, /*copy=*/true);
    const at::Tensor target = targets.reshape({-1});
    at::Tensor loss = take_losses(gradient, target, e).sum();
    if (mean) {
      const at::Tensor count = count_of(target, e, gradient.scalar_type());
      loss = loss / count;
      gradient.div_(count.clamp_min(1));
    }
    const int64_t padding = e.own - e.real;
    if (padding > 0) gradient = at::cat({gradient, at::zeros({gradient.size(0), padding}, gradient.options())}, 1);
    ctx->save_for_backward({gradient.to(given.scalar_type()).view(given.sizes())});
    return loss.to(given.scalar_type());
  }

  static variable_list backward(AutogradContext* ctx, variable_list dy) {
    return {ctx->get_saved_variables()[0] * dy[0], {}, {}, {}};
  }
};

// What is asked of a fused loss, besides its tensors.
struct Asked {
  Entries entries;
  bool mean = true, of_hidden = false, of_weight = false, of_bias = false;
  int64_t bytes_max = 0;
};

// Of how many tokens logits are made at a time. Ranks of a group agree.
int64_t tokens_at_a_time(const at::Tensor& x, at::ScalarType wide, const Asked& asked) {
  const int64_t wide_bytes = wide == x.scalar_type() ? 0 : static_cast<int64_t>(c10::elementSize(wide));
  const int64_t token_bytes = std::max<int64_t>(asked.entries.at_most, 1) * (x.element_size() + wide_bytes);
  return std::clamp<int64_t>(asked.bytes_max / token_bytes, 1, std::max<int64_t>(x.size(0), 1));
}

at::Tensor make_logits(at::Tensor memory, const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  return bias.defined() ? at::addmm_out(memory, bias, x, weight.t()) : at::mm_out(memory, x, weight.t());
}

struct FusedCrossEntropy : torch::autograd::Function<FusedCrossEntropy> {
  static Variable forward(AutogradContext* ctx, const Variable& hidden, const Variable& weight,
                          const c10::optional<Variable>& bias, const Variable& targets, const Asked& asked) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);  // the inputs were cast
    const Entries& e = asked.entries;
    const at::Tensor x = rows_of(hidden), target = targets.reshape({-1}), w = weight.narrow(0, 0, e.real);
    const at::Tensor b = bias ? bias->narrow(0, 0, e.real) : at::Tensor();
    const at::ScalarType wide = at::toOpMathType(x.scalar_type());
    const at::TensorOptions sums = x.options().dtype(wide);
    const at::Tensor losses = at::empty({x.size(0)}, sums);
    at::Tensor dx, dw, db;
    if (asked.of_hidden) dx = at::empty(hidden.sizes(), x.options());
    if (asked.of_weight) dw = at::zeros(weight.sizes(), sums);
    if (asked.of_bias) db = at::zeros({e.own}, sums);
    const int64_t most = tokens_at_a_time(x, wide, asked);
    const at::Tensor memory = at::empty({most, e.real}, x.options());
    const at::Tensor wider = wide == x.scalar_type() ? at::Tensor() : at::empty({most, e.real}, sums);
    for (int64_t begin = 0; begin < x.size(0); begin += most) {
      const int64_t count = std::min(most, x.size(0) - begin);
      const at::Tensor own = x.narrow(0, begin, count), logits = make_logits(memory.narrow(0, 0, count), own, w, b);
      const at::Tensor taken = wider.defined() ? wider.narrow(0, 0, count).copy_(logits) : logits;
      losses.narrow(0, begin, count).copy_(take_losses(taken, target.narrow(0, begin, count), e));
      if (wider.defined()) logits.copy_(taken);  // from here on both are the gradient of logits
      if (asked.of_bias) db.narrow(0, 0, e.real).add_(taken.sum(0));
      if (asked.of_weight && x.scalar_type() == at::kBFloat16) dw.narrow(0, 0, e.real).add_(logits.t().mm(own));
      else if (asked.of_weight) dw.narrow(0, 0, e.real).addmm_(taken.t(), own.to(wide));
      if (asked.of_hidden) {
        at::Tensor of_own = dx.view(x.sizes()).narrow(0, begin, count);
        at::mm_out(of_own, logits, w);
      }
    }
    if (asked.of_hidden && e.group) e.group->all_reduce(dx).wait();

    const at::Tensor count = asked.mean ? count_of(target, e, wide) : at::Tensor();
    ctx->set_materialize_grads(false);
    ctx->saved_data["bias"] = bias.has_value();
    ctx->save_for_backward({dx, dw, db, asked.mean ? count.clamp_min(1) : count, weight});
    return asked.mean ? losses.sum() / count : losses.sum();
  }

  static variable_list backward(AutogradContext* ctx, variable_list dys) {
    SHARD_REQUIRE(!c10::GradMode::is_enabled(), "fused_linear_cross_entropy",
                  "a backward with create_graph: this loss has no second gradient. Leave create_graph out, or take "
                  "cross_entropy of a linear layer");
    if (!dys[0].defined()) return {{}, {}, {}, {}, {}};
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &dx = saved[0], &dw = saved[1], &db = saved[2], &count = saved[3], &weight = saved[4];
    const at::Tensor scale = count.defined() ? dys[0] / count : dys[0];
    const bool has_bias = ctx->saved_data["bias"].toBool();
    // Unless another backward follows, what was kept is where the result is made.
    const auto scaled = [&](const at::Tensor& kept, at::Tensor place) {
      const bool is_needed = torch::autograd::get_current_graph_task_keep_graph() || kept.scalar_type() != weight.scalar_type();
      if (!place.defined()) place = is_needed ? at::empty(kept.sizes(), weight.options()) : kept;
      return at::mul_out(place, kept.to(scale.scalar_type()), scale);
    };
    variable_list gradients(5);
    if (dx.defined() && ctx->needs_input_grad(0)) gradients[0] = scaled(dx, {});
    if (dw.defined() && ctx->needs_input_grad(1)) gradients[1] = scaled(dw, direct::place_of_gradient(weight));
    if (db.defined() && has_bias && ctx->needs_input_grad(2)) gradients[2] = scaled(db, {});
    return gradients;
  }
};

void require_options(const CrossEntropyOptions& options, int64_t entries) {
  SHARD_REQUIRE(options.vocab >= 0 && options.vocab <= entries && options.label_smoothing >= 0 && options.label_smoothing <= 1,
                "cross_entropy", "vocab {} of {} entries, label_smoothing {}: out of range", options.vocab, entries,
                options.label_smoothing);
}

// On a device the host would wait; there take_losses makes the loss NaN.
void require_targets(const at::Tensor& targets, const Entries& e) {
  SHARD_REQUIRE(targets.scalar_type() == at::kLong, "cross_entropy", "targets must be int64, got {}",
                dtype_name(targets.scalar_type()));
  if (!targets.is_cpu()) return;
  const at::Tensor wrong = (targets != e.ignored).logical_and((targets < 0).logical_or(targets >= e.vocab)).reshape({-1});
  if (!wrong.any().item<bool>()) return;
  const int64_t first = wrong.to(at::kByte).argmax().item<int64_t>();
  SHARD_REQUIRE(false, "cross_entropy",
                "target {} of token {} is outside the vocabulary of {} and not the ignored {}; targets are in the whole "
                "vocabulary's numbering",
                targets.reshape({-1})[first].item<int64_t>(), first, e.vocab, e.ignored);
}

Entries entries_of(int64_t entries, Comm* group, const CrossEntropyOptions& options) {
  require_options(options, entries);
  const Interval own = group ? piece({}, entries, group->size(), group->rank()) : Interval{0, entries};
  const int64_t vocab = options.vocab > 0 ? options.vocab : entries;
  return {.first = own.begin,
          .own = own.size(),
          .real = std::clamp<int64_t>(vocab - own.begin, 0, own.size()),
          .vocab = vocab,
          .at_most = group ? piece({}, entries, group->size(), 0).size() : entries,
          .smoothing = options.label_smoothing,
          .ignored = options.ignore_index,
          .group = group && group->size() > 1 ? group : nullptr};
}

at::Tensor cast_by_autocast(const at::Tensor& x) {
  const c10::DeviceType type = x.device().type();
  if (!at::autocast::is_autocast_available(type) || !at::autocast::is_autocast_enabled(type)) return x;
  return at::autocast::cached_cast(at::autocast::get_autocast_dtype(type), x, type);
}

}  // namespace

at::Tensor vocab_parallel_cross_entropy(const at::Tensor& logits, const at::Tensor& targets, int64_t entries, Comm& group,
                                        const CrossEntropyOptions& options) {
  const Entries own = entries_of(entries, &group, options);
  SHARD_REQUIRE(
      logits.dim() >= 1 && logits.size(-1) == own.own && logits.sizes().slice(0, logits.dim() - 1) == targets.sizes(),
      "vocab_parallel_cross_entropy",
      "rank {} of {} in '{}': expected logits [.., {}] of {} entries beside targets [..], got {} and {}. Whole logits on "
      "each rank would add log({}) to the loss",
      group.rank(), group.size(), group.name(), own.own, entries, fmt::join(logits.sizes(), "x"),
      fmt::join(targets.sizes(), "x"), group.size());
  require_targets(targets, own);
  return CutCrossEntropy::apply(logits, targets, own, options.mean);
}

at::Tensor fused_linear_cross_entropy(const at::Tensor& given, const at::Tensor& given_weight, const at::Tensor& given_bias,
                                      const at::Tensor& targets, const CrossEntropyOptions& options, int64_t logits_bytes_max,
                                      std::optional<VocabSplit> split) {
  const at::Tensor hidden = cast_by_autocast(given), weight = cast_by_autocast(given_weight),
                   bias = given_bias.defined() ? cast_by_autocast(given_bias) : given_bias;
  Comm* group = split ? split->group : nullptr;
  SHARD_REQUIRE(!split || group, "fused_linear_cross_entropy", "a split without a group; leave it out, or name the group");
  const std::string who = group ? fmt::format("rank {} of {} in '{}': ", group->rank(), group->size(), group->name()) : "";
  SHARD_REQUIRE(hidden.dim() >= 1 && weight.dim() == 2 && hidden.size(-1) == weight.size(1) &&
                    hidden.sizes().slice(0, hidden.dim() - 1) == targets.sizes() &&
                    (!bias.defined() || bias.sizes() == weight.sizes().slice(0, 1)),
                "fused_linear_cross_entropy",
                "{}expected hidden [.., in], weight [entries, in], a bias [entries] or none, and targets [..], got [{}], [{}], "
                "[{}] and [{}]",
                who, fmt::join(hidden.sizes(), ", "), fmt::join(weight.sizes(), ", "),
                fmt::join(bias.defined() ? bias.sizes() : at::IntArrayRef(), ", "), fmt::join(targets.sizes(), ", "));
  SHARD_REQUIRE(hidden.is_floating_point() && weight.scalar_type() == hidden.scalar_type() &&
                    (!bias.defined() || bias.scalar_type() == hidden.scalar_type()),
                "fused_linear_cross_entropy", "{}hidden is {}, weight {}{}; they must have one floating dtype", who,
                dtype_name(hidden.scalar_type()), dtype_name(weight.scalar_type()),
                bias.defined() ? fmt::format(", bias {}", dtype_name(bias.scalar_type())) : "");
  SHARD_REQUIRE(logits_bytes_max > 0, "fused_linear_cross_entropy", "logits_bytes_max must be positive, got {}",
                logits_bytes_max);
  const int64_t entries = split ? split->entries : weight.size(0);
  const Entries own = entries_of(entries, group, options);
  SHARD_REQUIRE(weight.size(0) == own.own, "fused_linear_cross_entropy",
                "{}expected {} rows of a weight of {} entries, got {}. Give each rank its own rows", who, own.own, entries,
                weight.size(0));
  require_targets(targets, own);
  const bool differentiates = c10::GradMode::is_enabled();
  return FusedCrossEntropy::apply(hidden, weight, bias.defined() ? c10::make_optional(bias) : c10::nullopt, targets,
                                  Asked{.entries = own,
                                        .mean = options.mean,
                                        .of_hidden = differentiates && hidden.requires_grad(),
                                        .of_weight = differentiates && weight.requires_grad(),
                                        .of_bias = differentiates && bias.defined() && bias.requires_grad(),
                                        .bytes_max = logits_bytes_max});
}

}  // namespace shardproof
