#include "harness/problem.h"

#include <ATen/ATen.h>

#include <cmath>

#include "harness/exact_data.h"
#include "harness/random.h"
#include "shardproof/strategy.h"

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
  for (const auto& [name, shape] : golden::parameter_shapes(c.model)) {
    const Draws draws(c.seed, name);
    if (shape.size() == 2) {
      parameters.emplace_back(name, uniform(shape, draws, 1.5 / std::sqrt(static_cast<double>(shape[1]))));
    } else {
      const bool norm_weight = name.find("ln_") != std::string::npos && name.ends_with("weight");
      parameters.emplace_back(name, uniform(shape, draws, 0.2, norm_weight ? 1 : 0));
    }
  }
  return parameters;
}

golden::Microbatch microbatch(const Case& c, int64_t step, int64_t round, int64_t rank) {
  const Draws here = Draws(c.seed, "data").at(step).at(round).at(rank);
  const Draws input = here.at(1), target = here.at(2);
  const int64_t samples = here.integer(0, 1, kSamplesMax);
  if (c.model.kind == golden::Model::Kind::gpt) {
    const int64_t length = here.integer(1, 1, c.model.gpt.positions);
    const auto tokens = [&](const Draws& draws) {
      return filled<int64_t>({samples, length}, at::kLong,
                             [&](int64_t i) { return draws.integer(i, 0, c.model.gpt.vocab - 1); });
    };
    return {tokens(input), tokens(target), 1.0};
  }
  const std::vector<int64_t> in{samples, c.model.mlp.widths.front()}, out{samples, c.model.mlp.widths.back()};
  return {uniform(in, input, 1), uniform(out, target, 1), 1.0};
}

// Mean over ranks: each microbatch weighs 1 / (its elements * rounds), gradients are divided by the ranks. Otherwise each
// weighs 1 / (elements of the whole step). In `exact` mode the next lower power of two.
void weigh(const Case& c, golden::Step& step) {
  const auto rounds = static_cast<double>(step.microbatches.size());
  const auto ranks = static_cast<double>(step.microbatches[0].size());
  double elements = 0;
  for (const auto& round : step.microbatches)
    for (const golden::Microbatch& m : round) elements += static_cast<double>(m.target.numel());
  for (auto& round : step.microbatches)
    for (golden::Microbatch& m : round) {
      const double share = c.mean_over_ranks ? static_cast<double>(m.target.numel()) * rounds : elements;
      m.weight = c.mode == Mode::exact ? std::exp2(-std::ceil(std::log2(share))) : 1 / share;
    }
  step.divide = c.mean_over_ranks ? ranks : 1;
}

}  // namespace

golden::Run make_run(const Case& c) {
  golden::Run run;
  run.model = c.model;
  run.optimizer = c.optimizer;
  run.parameters = initial_parameters(c);
  run.order.shards = c.mesh.size();
  const bool accumulates = shardproof::accumulates_before_reducing(shardproof::strategy(c.strategy));
  for (size_t s = 0; s < c.rounds.size(); ++s) {
    golden::Step step;
    for (int64_t round = 0; round < c.rounds[s]; ++round) {
      step.microbatches.emplace_back();
      for (int64_t rank = 0; rank < c.mesh.size(); ++rank)
        step.microbatches.back().push_back(microbatch(c, static_cast<int64_t>(s), round, rank));
    }
    if (!accumulates) step.reduce_after.assign(step.microbatches.size(), true);
    step.clip_norm = c.clip_norm;
    weigh(c, step);
    run.steps.push_back(std::move(step));
  }
  if (c.mode == Mode::exact) make_exact(run, c.seed);
  return run;
}

}  // namespace harness
