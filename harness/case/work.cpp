#include "harness/case/work.h"

#include <utility>
#include <vector>

namespace harness {
namespace {

// Calls in one forward of one rank, roughly.
int64_t operators_of(const golden::Model& model) {
  using enum golden::Model::Kind;
  switch (model.kind) {
    case mlp:
      return static_cast<int64_t>(model.mlp.widths.size());
    case conv:
      return 2 * static_cast<int64_t>(model.conv.channels.size());
    case odd:
      return 4;
    case gpt:
      return 6 + 14 * model.gpt.layers;
    case llama: {
      const golden::Llama& m = model.llama;
      return 6 + 20 * m.layers + (m.experts > 0 ? (m.layers - m.dense_layers) * (10 + 6 * m.experts) : 0);
    }
  }
  return 0;
}

bool has_checkpoint(const StepPlan& step) {
  return step.save || step.crash || step.loads();
}

// All ways to leave one thing out of the history, so that less is left to do: without a load of a smaller mesh there may be
// more.
std::vector<Case> shorter(const Case& c) {
  std::vector<Case> found, with_fewer_checkpoints;
  for (size_t s = 0; s < c.steps.size(); ++s) {
    if (c.steps[s].rounds > kRoundsLeft) --found.emplace_back(c).steps[s].rounds;
    if (std::ssize(c.steps) <= kStepsLeft) continue;
    Case without = c;
    without.steps.erase(without.steps.begin() + static_cast<std::ptrdiff_t>(s));
    if (is_valid(without) && work_of(without) < work_of(c))
      (has_checkpoint(c.steps[s]) ? with_fewer_checkpoints : found).push_back(std::move(without));
  }
  return found.empty() ? with_fewer_checkpoints : found;
}

}  // namespace

int64_t work_of(const Case& c) {
  const int64_t operators = operators_of(c.model) * (c.mode == Mode::canonical ? 5 : 2);
  int64_t ranks = c.mesh.size(), work = 0;
  for (const StepPlan& step : c.steps) {
    if (step.load_mesh) ranks = step.load_mesh->size();
    const int64_t passes = 3 * (step.rounds + (step.discard ? 1 : 0)) + (step.eval ? 1 : 0);
    work += ranks * operators * passes / 6;
  }
  return work;
}

void bound_work(Chooser choose, Case& c) {
  if (choose.chance(0.05)) return;
  while (work_of(c) > kWorkMax) {
    const std::vector<Case> ways = shorter(c);
    if (ways.empty()) break;
    c = choose.one_of(ways);
  }
  for (int64_t* layers : {&c.model.gpt.layers, &c.model.llama.layers})
    if (*layers > kLayersLeft && work_of(c) > kWorkMax) try_change(c, [&] { *layers = kLayersLeft; });
}

}  // namespace harness
