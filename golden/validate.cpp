#include "golden/validate.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace golden {
namespace {

[[noreturn]] void refuse(const std::string& what) {
  throw std::invalid_argument("golden: " + what);
}

std::string shape_of(const at::Tensor& t) {
  return t.defined() ? fmt::format("{} [{}]", c10::toString(t.scalar_type()), fmt::join(t.sizes(), ", "))
                     : "nothing";
}

void require_tokens(const at::Tensor& tokens, int64_t vocab, const char* what) {
  const at::Tensor flat = tokens.contiguous();
  const int64_t* data = flat.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < flat.numel(); ++i)
    if (data[i] < 0 || data[i] >= vocab)
      refuse(fmt::format("{} token {} is {}, expected 0 to vocab - 1 = {}", what, i, data[i], vocab - 1));
}

// Input [B, in...] and target [B, out...] with the same B.
void require_data(const char* model, const std::vector<int64_t>& in, const std::vector<int64_t>& out, const Microbatch& data) {
  const auto fits = [](const at::Tensor& t, const std::vector<int64_t>& rest) {
    return t.defined() && at::isFloatingType(t.scalar_type()) && t.dim() == std::ssize(rest) + 1 && t.size(0) > 0 &&
           t.sizes().slice(1) == at::IntArrayRef(rest);
  };
  if (!fits(data.input, in) || !fits(data.target, out) || data.input.size(0) != data.target.size(0))
    refuse(fmt::format("{} data: expected floating input [B, {}] and target [B, {}] with B >= 1, got {} and {}", model,
                       fmt::join(in, ", "), fmt::join(out, ", "), shape_of(data.input), shape_of(data.target)));
}

void require_gpt_data(const Gpt& gpt, const at::Tensor& input, const at::Tensor& target) {
  const auto fits = [&](const at::Tensor& t) {
    return t.defined() && t.scalar_type() == at::kLong && t.dim() == 2 && t.numel() > 0 &&
           t.size(1) <= gpt.positions;
  };
  if (!fits(input) || !fits(target) || input.sizes() != target.sizes())
    refuse(fmt::format(
        "gpt data: expected int64 input and target [B, T] with B >= 1 and 1 <= T <= positions = {}, got {} "
        "and {}",
        gpt.positions, shape_of(input), shape_of(target)));
  require_tokens(input, gpt.vocab, "input");
  require_tokens(target, gpt.vocab, "target");
}

}  // namespace

void require_valid(const Model& model) {
  if (model.kind == Model::Kind::conv) {
    const Conv& c = model.conv;
    if (c.channels.size() < 2 || *std::min_element(c.channels.begin(), c.channels.end()) < 1 || c.kernel < 1 || c.kernel % 2 == 0 ||
        c.size < 1 || c.classes < 1)
      refuse(fmt::format("conv: expected two or more channels, each at least 1, an odd kernel, and size and classes >= 1, got channels "
                         "[{}] kernel={} size={} classes={}",
                         fmt::join(c.channels, ", "), c.kernel, c.size, c.classes));
    return;
  }
  if (model.kind == Model::Kind::odd) {
    if (model.odd.width < 1 || model.odd.calls < 1 || model.odd.calls > 3)
      refuse(fmt::format("odd: expected width >= 1 and calls 1 to 3, got width={} calls={}", model.odd.width, model.odd.calls));
    return;
  }
  if (model.kind == Model::Kind::mlp) {
    const auto& widths = model.mlp.widths;
    if (widths.size() < 2 || *std::min_element(widths.begin(), widths.end()) < 1)
      refuse(fmt::format("mlp widths: expected at least two, each at least 1, got [{}]",
                         fmt::join(widths, ", ")));
    return;
  }
  const Gpt& gpt = model.gpt;
  if (gpt.layers < 0 || gpt.hidden < 1 || gpt.heads < 1 || gpt.vocab < 1 || gpt.positions < 1)
    refuse(fmt::format(
        "gpt: expected layers >= 0 and hidden, heads, vocab, positions >= 1, got layers={} hidden={} "
        "heads={} vocab={} positions={}",
        gpt.layers, gpt.hidden, gpt.heads, gpt.vocab, gpt.positions));
  if (gpt.hidden % gpt.heads != 0)
    refuse(fmt::format("gpt: hidden {} is not divisible by heads {}; choose heads that divide it", gpt.hidden,
                       gpt.heads));
}

void require_valid(const Model& model, const Microbatch& microbatch) {
  switch (model.kind) {
    case Model::Kind::gpt: return require_gpt_data(model.gpt, microbatch.input, microbatch.target);
    case Model::Kind::mlp:
      return require_data("mlp", {model.mlp.widths.front()}, {model.mlp.widths.back()}, microbatch);
    case Model::Kind::conv:
      return require_data("conv", {model.conv.channels.front(), model.conv.size, model.conv.size}, {model.conv.classes}, microbatch);
    case Model::Kind::odd: return require_data("odd", {model.odd.width}, {model.odd.width}, microbatch);
  }
}

void require_valid(const Model& model, const Named& parameters) {
  const auto shapes = parameter_shapes(model);
  if (parameters.size() != shapes.size())
    refuse(fmt::format("expected {} parameters, got {}", shapes.size(), parameters.size()));
  for (size_t i = 0; i < shapes.size(); ++i) {
    const auto& [name, shape] = shapes[i];
    const auto& [given, value] = parameters[i];
    if (given != name || !value.defined() || value.scalar_type() != at::kFloat ||
        value.sizes() != at::IntArrayRef(shape))
      refuse(fmt::format("parameter {}: expected {} Float [{}], got {} {}", i, name, fmt::join(shape, ", "),
                         given, shape_of(value)));
  }
}

void require_valid(const Model& model, const Step& step) {
  if (step.microbatches.empty() || step.microbatches.front().empty())
    refuse("a step needs at least one round of at least one rank");
  for (size_t k = 0; k < step.microbatches.size(); ++k) {
    if (step.microbatches[k].size() != step.microbatches.front().size())
      refuse(fmt::format("round {} has {} ranks, round 0 has {}; every round must have all ranks", k,
                         step.microbatches[k].size(), step.microbatches.front().size()));
    for (const Microbatch& microbatch : step.microbatches[k]) require_valid(model, microbatch);
  }
  if (!(step.divide > 0) || !std::isfinite(step.divide))
    refuse(fmt::format("divide: expected a finite number above 0, got {}", step.divide));
  if (!(step.divide_before > 0) || !std::isfinite(step.divide_before))
    refuse(fmt::format("divide_before: expected a finite number above 0, got {}", step.divide_before));
  if (!step.reduce_after.empty() && step.reduce_after.size() != step.microbatches.size())
    refuse(fmt::format("reduce_after: expected nothing or {} rounds, got {}", step.microbatches.size(), step.reduce_after.size()));
  if (step.norm_order != 1 && step.norm_order != 2 && step.norm_order != INFINITY)
    refuse(fmt::format("norm_order: expected 1, 2 or infinity, got {}", step.norm_order));
  if (!(step.clip_norm >= 0)) refuse(fmt::format("clip_norm: expected at least 0, got {}", step.clip_norm));
}

void require_valid(const Optimizer& o) {
  const auto require = [](bool ok, const char* what, double got) {
    if (!ok) refuse(fmt::format("optimizer: expected {}, got {}", what, got));
  };
  require(std::isfinite(o.lr) && o.lr >= 0, "a finite lr >= 0", o.lr);
  require(std::isfinite(o.weight_decay) && o.weight_decay >= 0, "a finite weight_decay >= 0", o.weight_decay);
  require(std::isfinite(o.momentum) && o.momentum >= 0, "a finite momentum >= 0", o.momentum);
  require(!o.nesterov || o.momentum > 0, "a momentum above 0 with nesterov", o.momentum);
  if (o.kind == Optimizer::Kind::sgd) return;
  require(o.beta1 >= 0 && o.beta1 < 1, "0 <= beta1 < 1", o.beta1);
  require(o.beta2 >= 0 && o.beta2 < 1, "0 <= beta2 < 1", o.beta2);
  require(std::isfinite(o.eps) && o.eps >= 0, "a finite eps >= 0", o.eps);
}

void require_valid(const Run& run) {
  require_valid(run.model, run.parameters);
  require_valid(run.optimizer);
  for (const Step& step : run.steps) require_valid(run.model, step);
}

}  // namespace golden
