#include "harness/case/problem.h"

#include <ATen/ATen.h>

#include <cmath>
#include <numbers>

#include "harness/case/exact_data.h"
#include "harness/case/parallel_sizes.h"
#include "harness/case/random.h"
#include "shardproof/algebra/strategy.h"

namespace harness {
namespace {

constexpr int64_t kSamplesMax = 3;

template <class Value>
at::Tensor filled(std::vector<int64_t> sizes, at::ScalarType dtype, const std::function<Value(int64_t)>& value) {
  at::Tensor tensor = at::empty(sizes, dtype);
  Value* data = tensor.mutable_data_ptr<Value>();
  for (int64_t i = 0; i < tensor.numel(); ++i) data[i] = value(i);
  return tensor;
}

at::Tensor uniform(std::vector<int64_t> sizes, const Draws& draws, double scale, double shift = 0) {
  return filled<float>(std::move(sizes), at::kFloat, [&](int64_t i) {
    return static_cast<float>((2 * draws.unit(i) - 1) * scale + shift);
  });
}

golden::Named initial_parameters(const Case& c) {
  golden::Named parameters;
  for (const auto& [name, shape] : golden::parameter_shapes(model_of(c))) {
    const Draws draws(c.seed, name);
    const bool scales = name == "gain" || ((name.find("ln_") != std::string::npos || name.find("norm") != std::string::npos) &&
                                           name.ends_with("weight"));
    int64_t inputs = 1;
    // Of experts there is one matrix each.
    for (size_t dim = is_of_experts(name) ? 2 : 1; dim < shape.size(); ++dim) inputs *= shape[dim];
    if (shape.size() >= 2 && inputs > 0) {
      const double size = name.ends_with("lora_B.weight") ? 0.5 : 1.5;
      parameters.emplace_back(name, uniform(shape, draws, size / std::sqrt(static_cast<double>(inputs))));
    } else {
      parameters.emplace_back(name, uniform(shape, draws, 0.2, scales ? 1 : 0));
    }
  }
  return parameters;
}

// 0: always, 1: never, else now and then.
uint64_t branch_habit(const Case& c) { return Draws(c.seed, "branch").bits(0) % 4; }

golden::Microbatch microbatch(const Case& c, int64_t step, int64_t round, int64_t rank) {
  using Kind = golden::Model::Kind;
  const Draws here = Draws(c.seed, "data").at(step).at(round).at(rank);
  const Draws input = here.at(1), target = here.at(2);
  const int64_t samples = here.integer(0, 1, kSamplesMax);
  if (c.model.of_tokens()) {
    int64_t length = here.integer(1, 1, c.model.positions());
    while (!sequence_fits(c, length)) ++length;
    const auto tokens = [&](const Draws& draws) {
      return filled<int64_t>({samples, length}, at::kLong, [&](int64_t i) { return draws.integer(i, 0, c.model.vocab() - 1); });
    };
    return {tokens(input), tokens(target), 1.0, true, here.bits(8)};
  }
  std::vector<int64_t> in, out;
  switch (c.model.kind) {
    case Kind::conv:
      in = {samples, c.model.conv.channels.front(), c.model.conv.size, c.model.conv.size};
      out = {samples, c.model.conv.classes};
      break;
    case Kind::odd: in = out = {samples, c.model.odd.width}; break;
    default: in = {samples, c.model.mlp.widths.front()}, out = {samples, c.model.mlp.widths.back()};
  }
  golden::Microbatch result{uniform(in, input, 1), uniform(out, target, 1), 1.0};
  // The side branch: taken everywhere, nowhere, or by some of the microbatches.
  result.branch = branches_differ(c) ? here.bits(7) % 2 == 0 : branch_habit(c) == 0;
  return result;
}

// Mean over ranks: each microbatch weighs 1 / (its elements * rounds), gradients are divided by the ranks. Or each weighs
// 1 / (elements of the whole step). Or each weighs 1, and gradients are divided by the elements. In `exact` mode the next lower
// power of two.
void weigh(const Case& c, golden::Step& step) {
  const auto rounds = static_cast<double>(step.microbatches.size());
  const auto ranks = static_cast<double>(step.microbatches[0].size());
  double elements = 0;
  for (const auto& round : step.microbatches)
    for (const golden::Microbatch& m : round) elements += static_cast<double>(m.target.numel());
  for (auto& round : step.microbatches)
    for (golden::Microbatch& m : round) {
      const double share = c.options.loss == loss_mean ? static_cast<double>(m.target.numel()) * rounds
                           : c.options.loss == loss_sum ? elements
                                                         : 1;
      m.weight = c.mode == Mode::exact ? std::exp2(-std::ceil(std::log2(share))) : 1 / share;
    }
  const double total = c.options.loss == loss_mean ? ranks : c.options.loss == loss_sum ? 1 : elements;
  // Averages in the collective are divisions by powers of two, which commute with sums: as after it.
  if (c.options.divide == divide_before) step.divide_before = total;
  if (c.options.divide == divide_split) step.divide_before = std::exp2(std::round(std::log2(std::sqrt(total))));
  step.divide = total / step.divide_before;
}

// Of the learning rate: up in a straight line for kWarmup steps, then down to kScheduleLast, where it stays.
double scheduled(const Case& c, int64_t step) {
  if (c.options.schedule == schedule_constant) return 1;
  if (step < kWarmup) return (static_cast<double>(step) + 1) / kWarmup;
  const double left = static_cast<double>(std::max<int64_t>(kScheduleSteps - step, 0)) / (kScheduleSteps - kWarmup);
  const double cosine = std::cos(std::numbers::pi / 2 * (1 - left));
  return kScheduleLast + (1 - kScheduleLast) * (c.options.schedule == schedule_linear ? left : cosine * cosine);
}

golden::Precision precision(const CaseOptions& o) {
  const auto dtype = [](int64_t value) { return value == bf16 ? at::kBFloat16 : value == fp16 ? at::kHalf : at::kFloat; };
  return {.compute = dtype(o.compute),
          .gradient = dtype(o.gradient),
          .reduce = dtype(o.reduce),
          .float32_sums = o.float32_sums != 0};
}

}  // namespace

bool branches_differ(const Case& c) {
  return c.model.kind == golden::Model::Kind::odd && c.model.odd.side && branch_habit(c) > 1;
}

std::vector<bool> reductions(const Case& c, const StepPlan& plan) {
  const shardproof::Strategy strategy =
      shardproof::on_mesh(shardproof::strategy(c.strategy), shardproof::data_parallel_mesh(c.mesh));
  const bool sums = c.shards() > 1 || (c.options.of("reduce_replicas_every_microbatch") != 0 && c.replicas() > 1);
  if (shardproof::accumulates_before_reducing(strategy) || !sums) return {};
  std::vector<bool> after;
  for (int64_t round = 1; round <= plan.rounds; ++round) after.push_back(round % plan.sync_every == 0 || round == plan.rounds);
  return after;
}

golden::Run make_run(const Case& c) {
  golden::Run run{.model = model_of(c),
                  .optimizer = c.optimizer,
                  .parameters = initial_parameters(c),
                  .steps = {},
                  .order = {},
                  .precision = precision(c.options),
                  .scaling = {}};
  run.model.canonical = c.options.arithmetic != 0;
  run.optimizer.groups = optimizer_groups(c);
  run.order = {.shards = c.shards(),
               .replicas = c.replicas(),
               .replicas_last = c.options.of("reduce_replicas_every_microbatch") == 0,
               .canonical = c.mode == Mode::canonical};
  run.scaling = {.initial = static_cast<double>(c.options.loss_scale),
                 .growth_interval = 2,
                 .minimum = static_cast<double>(c.options.scale_min)};
  run.ema = static_cast<double>(c.options.ema) / 100;
  for (size_t s = 0; s < c.steps.size(); ++s) {
    const StepPlan& plan = c.steps[s];
    const Case here = c.at(s);
    golden::Step step;
    step.order = run.order;
    step.order->shards = here.shards();
    step.order->replicas = here.replicas();
    if (plan.loads()) step.after = c.loaded_after(s);
    step.evaluate = plan.eval, step.discard = plan.discard;
    for (int64_t round = 0; round < plan.rounds; ++round) {
      step.microbatches.emplace_back();
      for (int64_t rank = 0; rank < here.data_ranks(); ++rank)
        step.microbatches.back().push_back(microbatch(here, static_cast<int64_t>(s), round, rank));
    }
    step.reduce_after = reductions(here, plan);
    step.clip_norm = c.clip_norm;
    step.norm_order = c.norm_order == 0 ? INFINITY : static_cast<double>(c.norm_order);
    step.lr_factor = static_cast<double>(plan.lr_percent) / 100 * scheduled(c, static_cast<int64_t>(s));
    step.frozen = frozen_parameters(c, plan);
    weigh(c, step);
    run.steps.push_back(std::move(step));
  }
  if (c.mode == Mode::exact) make_exact(run, c.seed);
  return run;
}

}  // namespace harness
