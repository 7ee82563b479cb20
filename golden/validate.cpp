#include "golden/validate.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace golden {

void refuse(const std::string& what) {
  throw std::invalid_argument("golden: " + what);
}

namespace {

std::string shape_of(const at::Tensor& t) {
  return t.defined() ? fmt::format("{} [{}]", c10::toString(t.scalar_type()), fmt::join(t.sizes(), ", ")) : "nothing";
}

void require_tokens(const at::Tensor& tokens, int64_t vocab, const char* what) {
  const at::Tensor flat = tokens.contiguous();
  const int64_t* data = flat.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < flat.numel(); ++i)
    if (data[i] < 0 || data[i] >= vocab)
      refuse(fmt::format("{} token {} is {}, expected 0 to vocab - 1 = {}", what, i, data[i], vocab - 1));
}

void require_token_data(const Model& model, const at::Tensor& input, const at::Tensor& target) {
  const auto fits = [&](const at::Tensor& t) {
    return t.defined() && t.scalar_type() == at::kLong && t.dim() == 2 && t.numel() > 0 && t.size(1) <= model.positions();
  };
  if (!fits(input) || !fits(target) || input.sizes() != target.sizes())
    refuse(
        fmt::format("{} data: expected int64 input and target [B, T] with B >= 1 and 1 <= T <= positions = {}, got {} "
                    "and {}",
                    model.kind == Model::Kind::gpt ? "gpt" : "llama", model.positions(), shape_of(input), shape_of(target)));
  require_tokens(input, model.vocab(), "input");
  require_tokens(target, model.vocab(), "target");
}

// Floating input and target [B, <sizes>].
void require_floating_data(const char* kind, const std::vector<int64_t>& input_sizes, const std::vector<int64_t>& target_sizes,
                           const Microbatch& m) {
  const auto fits = [&](const at::Tensor& t, const std::vector<int64_t>& sizes) {
    return t.defined() && at::isFloatingType(t.scalar_type()) && t.dim() > 0 && t.size(0) > 0 &&
           t.sizes().slice(1) == at::IntArrayRef(sizes);
  };
  if (!fits(m.input, input_sizes) || !fits(m.target, target_sizes) || m.input.size(0) != m.target.size(0))
    refuse(fmt::format("{} data: expected floating input [B, {}] and target [B, {}] with B >= 1, got {} and {}", kind,
                       fmt::join(input_sizes, ", "), fmt::join(target_sizes, ", "), shape_of(m.input), shape_of(m.target)));
}

void require_widths(const char* what, const std::vector<int64_t>& widths) {
  if (widths.size() < 2 || *std::min_element(widths.begin(), widths.end()) < 1)
    refuse(fmt::format("{}: expected at least two, each at least 1, got [{}]", what, fmt::join(widths, ", ")));
}

void require_gpt(const Gpt& gpt) {
  if (gpt.layers < 0 || gpt.hidden < 1 || gpt.heads < 1 || gpt.vocab < 1 || gpt.positions < 1)
    refuse(
        fmt::format("gpt: expected layers >= 0 and hidden, heads, vocab, positions >= 1, got layers={} hidden={} "
                    "heads={} vocab={} positions={}",
                    gpt.layers, gpt.hidden, gpt.heads, gpt.vocab, gpt.positions));
  if (gpt.hidden % gpt.heads != 0)
    refuse(fmt::format("gpt: hidden {} is not divisible by heads {}; choose heads that divide it", gpt.hidden, gpt.heads));
}

void require_dropout(double probability) {
  if (!(probability >= 0 && probability < 1))
    refuse(fmt::format("dropout: expected a probability of at least 0 and below 1, got {}", probability));
}

void require_experts(const Llama& m) {
  const int64_t experts = m.experts, groups = m.expert_groups;
  if (experts < 0 || m.dense_layers < 0 || m.shared_width < 0)
    refuse(fmt::format("llama: expected experts, dense_layers, shared_width >= 0, got {}, {} and {}", experts, m.dense_layers,
                       m.shared_width));
  if (experts == 0) return;
  if (m.expert_width < 1 || !std::isfinite(m.expert_scale))
    refuse(fmt::format("llama: expected expert_width >= 1 and a finite expert_scale, got {} and {}", m.expert_width,
                       m.expert_scale));
  for (const double value : {m.expert_balance, m.expert_z, m.expert_bias, m.expert_capacity})
    if (!(std::isfinite(value) && value >= 0))
      refuse(fmt::format("llama: expected expert_balance, expert_z, expert_bias, expert_capacity >= 0, got {}, {}, {} and {}",
                         m.expert_balance, m.expert_z, m.expert_bias, m.expert_capacity));
  if (!std::isfinite(m.expert_lean)) refuse(fmt::format("llama: expected a finite expert_lean, got {}", m.expert_lean));
  if (groups < 1 || experts % groups != 0 || m.groups_per_token < 1 || m.groups_per_token > groups)
    refuse(
        fmt::format("llama: expected expert_groups that divide experts and 1 to expert_groups groups_per_token, got "
                    "experts={} expert_groups={} groups_per_token={}",
                    experts, groups, m.groups_per_token));
  const int64_t available = experts / groups * m.groups_per_token;
  if (m.experts_per_token < 1 || m.experts_per_token > available)
    refuse(fmt::format("llama: expected 1 to {} experts_per_token, which are in a token's groups, got {}", available,
                       m.experts_per_token));
}

void require_latents(const Llama& m) {
  if (m.rotary_size < 0 || m.rotary_size % 2 != 0 || m.rotary_size > m.head())
    refuse(fmt::format("llama: rotary_size {} must be even and at most the {} features of a head", m.rotary_size, m.head()));
  if (m.kv_rank < 0 || (m.kv_rank == 0 && (m.query_rank != 0 || m.value_size != 0 || m.interleaved || m.rope_yarn)))
    refuse(fmt::format("llama: expected kv_rank > 0, or no query_rank, value_size, interleaved and rope_yarn, got kv_rank={}",
                       m.kv_rank));
  if (m.kv_rank > 0 && (m.heads != m.kv_heads || m.qk_norm || m.qkv_bias || m.turning() >= m.head() || m.query_rank < 0 ||
                        m.value_size < 0 || m.value_size > m.head()))
    refuse(
        fmt::format("llama: with kv_rank expected as many kv_heads as heads, no qk_norm and qkv_bias, rotary_size < {}, "
                    "query_rank >= 0 and value_size from 0 to {}, got heads={} kv_heads={} qk_norm={} qkv_bias={} "
                    "rotary_size={} query_rank={} value_size={}",
                    m.head(), m.head(), m.heads, m.kv_heads, m.qk_norm, m.qkv_bias, m.rotary_size, m.query_rank, m.value_size));
  if (!std::isfinite(m.rope_mscale) || (m.rope_yarn && !(m.theta > 1)))
    refuse(fmt::format("llama: expected a finite rope_mscale, and with rope_yarn theta > 1, got {} and {}", m.rope_mscale,
                       m.theta));
}

void require_llama(const Llama& m) {
  if (m.layers < 0 || m.hidden < 1 || m.heads < 1 || m.kv_heads < 1 || m.intermediate < 1 || m.vocab < 1 || m.positions < 1)
    refuse(
        fmt::format("llama: expected layers >= 0 and hidden, heads, kv_heads, intermediate, vocab, positions >= 1, got "
                    "layers={} hidden={} heads={} kv_heads={} intermediate={} vocab={} positions={}",
                    m.layers, m.hidden, m.heads, m.kv_heads, m.intermediate, m.vocab, m.positions));
  if (m.head_size < 0 || m.head_size % 2 != 0)
    refuse(fmt::format("llama: head_size {} must be even and not below 0", m.head_size));
  if (!(m.theta > 0) || !(m.eps > 0) || !(m.rope_factor > 0) || !(m.rope_low > 0) || !(m.rope_high > m.rope_low) ||
      m.rope_positions < 1)
    refuse(fmt::format(
        "llama: expected theta, eps, rope_factor, rope_low and rope_positions above 0 and rope_high above rope_low, "
        "got theta={} eps={} rope_factor={} rope_low={} rope_high={} rope_positions={}",
        m.theta, m.eps, m.rope_factor, m.rope_low, m.rope_high, m.rope_positions));
  if (m.window < 0 || m.full_layers < 0 || (m.window == 0 && m.full_layers > 0))
    refuse(fmt::format("llama: expected window >= 0, and full_layers >= 0 where there is a window, got {} and {}", m.window,
                       m.full_layers));
  if (m.document_end < -1 || m.document_end >= m.vocab)
    refuse(fmt::format("llama: document_end {} must be one of the {} tokens, or -1", m.document_end, m.vocab));
  const bool fits = m.head_size > 0 || (m.hidden % m.heads == 0 && m.hidden / m.heads % 2 == 0);
  if (!fits || m.heads % m.kv_heads != 0)
    refuse(fmt::format("llama: hidden {} must be a multiple of heads {}, by an even number, and that of kv_heads {}", m.hidden,
                       m.heads, m.kv_heads));
  require_latents(m);
  require_experts(m);
}

void require_conv(const Conv& conv) {
  require_widths("conv channels", conv.channels);
  if (conv.kernel < 1 || conv.kernel % 2 == 0 || conv.size < 1 || conv.classes < 1)
    refuse(fmt::format("conv: expected an odd kernel and size, classes >= 1, got kernel={} size={} classes={}", conv.kernel,
                       conv.size, conv.classes));
  if (conv.norm && conv.batch && conv.size < 2) refuse("conv: a batch norm needs a size of at least 2, got 1");
}

void require_odd(const Odd& odd) {
  if (odd.width < 1 || odd.calls < 1 || odd.calls > 3)
    refuse(fmt::format("odd: expected width >= 1 and 1 to 3 calls, got width={} calls={}", odd.width, odd.calls));
}

}  // namespace

void require_valid(const Model& model) {
  require_dropout(model.dropout());
  require_dropout(model.adapters.dropout);
  if (!model.adapters.layers.empty() &&
      (model.adapters.rank < 1 || model.kind == Model::Kind::conv || model.kind == Model::Kind::odd))
    refuse(
        fmt::format("adapters: expected a rank of at least 1 and an mlp, a gpt or a llama, got rank={}", model.adapters.rank));
  if (model.canonical && model.kind == Model::Kind::gpt && model.gpt.tanh_gelu)
    refuse("gpt: canonical arithmetic has the gelu of the erf form, and tanh_gelu is of the other");
  switch (model.kind) {
    case Model::Kind::mlp:
      return require_widths("mlp widths", model.mlp.widths);
    case Model::Kind::gpt:
      return require_gpt(model.gpt);
    case Model::Kind::conv:
      return require_conv(model.conv);
    case Model::Kind::odd:
      return require_odd(model.odd);
    case Model::Kind::llama:
      return require_llama(model.llama);
  }
  refuse("unknown model");
}

void require_valid(const Model& model, const Microbatch& m) {
  switch (model.kind) {
    case Model::Kind::mlp:
      return require_floating_data("mlp", {model.mlp.widths.front()}, {model.mlp.widths.back()}, m);
    case Model::Kind::gpt:
    case Model::Kind::llama:
      return require_token_data(model, m.input, m.target);
    case Model::Kind::conv:
      return require_floating_data("conv", {model.conv.channels.front(), model.conv.size, model.conv.size},
                                   {model.conv.classes}, m);
    case Model::Kind::odd:
      return require_floating_data("odd", {model.odd.width}, {model.odd.width}, m);
  }
}

void require_valid(const Model& model, const Named& parameters) {
  const auto shapes = parameter_shapes(model);
  if (parameters.size() != shapes.size())
    refuse(fmt::format("expected {} parameters, got {}", shapes.size(), parameters.size()));
  for (size_t i = 0; i < shapes.size(); ++i) {
    const auto& [name, shape] = shapes[i];
    const auto& [given, value] = parameters[i];
    if (given != name || !value.defined() || value.scalar_type() != at::kFloat || value.sizes() != at::IntArrayRef(shape))
      refuse(fmt::format("parameter {}: expected {} Float [{}], got {} {}", i, name, fmt::join(shape, ", "), given,
                         shape_of(value)));
  }
}

void require_valid(const Model& model, const Step& step) {
  if (step.microbatches.empty() || step.microbatches.front().empty())
    refuse("a step needs at least one round of at least one rank");
  if (model.kind == Model::Kind::llama && model.llama.balance_over == Llama::BalanceOver::step && step.microbatches.size() > 1)
    refuse(fmt::format("llama: with balance_over a step has one round, got {}", step.microbatches.size()));
  for (size_t k = 0; k < step.microbatches.size(); ++k) {
    if (step.microbatches[k].size() != step.microbatches.front().size())
      refuse(fmt::format("round {} has {} ranks, round 0 has {}; every round must have all ranks", k,
                         step.microbatches[k].size(), step.microbatches.front().size()));
    for (const Microbatch& microbatch : step.microbatches[k]) require_valid(model, microbatch);
  }
  if (!step.reduce_after.empty() && step.reduce_after.size() != step.microbatches.size())
    refuse(fmt::format("reduce_after: expected nothing or one of each of {} rounds, got {}", step.microbatches.size(),
                       step.reduce_after.size()));
  const auto require_divisor = [](const char* what, double divisor) {
    if (!(divisor > 0) || !std::isfinite(divisor))
      refuse(fmt::format("{}: expected a finite number above 0, got {}", what, divisor));
  };
  require_divisor("divide", step.divide);
  require_divisor("divide_before", step.divide_before);
  if (!(step.clip_norm >= 0)) refuse(fmt::format("clip_norm: expected at least 0, got {}", step.clip_norm));
  if (step.norm_order != 1 && step.norm_order != 2 && step.norm_order != INFINITY)
    refuse(fmt::format("norm_order: expected 1, 2 or infinity, got {}", step.norm_order));
  if (!(step.lr_factor >= 0) || !std::isfinite(step.lr_factor))
    refuse(fmt::format("lr_factor: expected a finite number >= 0, got {}", step.lr_factor));
  const auto shapes = parameter_shapes(model);
  for (const std::string& name : step.frozen)
    if (std::none_of(shapes.begin(), shapes.end(), [&](const auto& shape) { return shape.first == name; }))
      refuse(fmt::format("frozen: the model has no parameter {}", name));
}

void require_valid(const Optimizer& o) {
  const auto require = [](bool ok, const char* what, double got) {
    if (!ok) refuse(fmt::format("optimizer: expected {}, got {}", what, got));
  };
  require(std::isfinite(o.lr) && o.lr >= 0, "a finite lr >= 0", o.lr);
  require(std::isfinite(o.weight_decay) && o.weight_decay >= 0, "a finite weight_decay >= 0", o.weight_decay);
  for (const Optimizer::Group& group : o.groups) {
    require(std::isfinite(group.lr_factor) && group.lr_factor >= 0, "a finite lr_factor >= 0", group.lr_factor);
    require(std::isfinite(group.decay_factor) && group.decay_factor >= 0, "a finite decay_factor >= 0", group.decay_factor);
  }
  if (o.kind == Optimizer::Kind::sgd || o.kind == Optimizer::Kind::muon)
    require(std::isfinite(o.momentum) && o.momentum >= 0, "a finite momentum >= 0", o.momentum);
  if (o.kind == Optimizer::Kind::sgd) {
    require(!o.nesterov || o.momentum > 0, "a momentum above 0 with nesterov", o.momentum);
    return;
  }
  require(o.beta1 >= 0 && o.beta1 < 1, "0 <= beta1 < 1", o.beta1);
  require(o.beta2 >= 0 && o.beta2 < 1, "0 <= beta2 < 1", o.beta2);
  require(std::isfinite(o.eps) && o.eps >= 0, "a finite eps >= 0", o.eps);
}

void require_valid(const SumOrder& order) {
  if (order.shards < 1 || order.replicas < 1)
    refuse(fmt::format("order: expected shards and replicas >= 1, got {} and {}", order.shards, order.replicas));
}

void require_valid(const SumOrder& order, const Step& step) {
  require_valid(order);
  const auto ranks = static_cast<int64_t>(step.microbatches.front().size());
  if (!order.canonical && order.shards * order.replicas != ranks)
    refuse(fmt::format("order: {} shards times {} replicas are not the {} ranks of the step", order.shards, order.replicas,
                       ranks));
  if (order.canonical && step.divide_before != 1)
    refuse(fmt::format("divide_before: canonical sums are of integers, which cannot be divided before; got {}, use divide",
                       step.divide_before));
}

void require_valid(const Precision& precision) {
  const auto require = [](const char* what, at::ScalarType dtype) {
    if (dtype != at::kFloat && dtype != at::kBFloat16 && dtype != at::kHalf)
      refuse(fmt::format("precision: {}: expected Float, BFloat16 or Half, got {}", what, c10::toString(dtype)));
  };
  require("compute", precision.compute);
  require("gradient", precision.gradient);
  require("reduce", precision.reduce);
}

void require_valid(const LossScaling& scaling) {
  if (!(scaling.initial >= 0) || !std::isfinite(scaling.initial))
    refuse(fmt::format("loss scaling: expected a finite initial >= 0, got {}", scaling.initial));
  if (!(scaling.minimum >= 0 && scaling.minimum <= scaling.initial))
    refuse(fmt::format("loss scaling: expected a minimum from 0 to initial {}, got {}", scaling.initial, scaling.minimum));
  if (scaling.growth_interval < 1)
    refuse(fmt::format("loss scaling: expected a growth_interval of at least 1, got {}", scaling.growth_interval));
}

void require_valid(const Run& run) {
  require_valid(run.model, run.parameters);
  require_valid(run.optimizer);
  require_valid(run.order);
  require_valid(run.precision);
  require_valid(run.scaling);
  for (const Step& step : run.steps) {
    const int64_t index = &step - run.steps.data();
    if (step.after && (*step.after < -1 || *step.after >= index))
      refuse(fmt::format("step {} begins after step {}, expected an earlier one, or 0 for the beginning", index + 1,
                         *step.after + 1));
    require_valid(run.model, step);
    require_valid(step.order.value_or(run.order), step);
  }
}

}  // namespace golden
