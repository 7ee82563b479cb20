#include "harness/run/traced_step.h"

#include <ATen/ATen.h>

#include "harness/run/suspects.h"
#include "harness/run/wrong_pieces.h"

namespace harness {
namespace {

// The gradients of the first microbatch by the golden functions.
golden::Named golden_gradients(const golden::Run& run, size_t step, const golden::Named& parameters) {
  golden::Run alone = plain_step(run, step, parameters);
  alone.order = {};
  alone.steps = {{.microbatches = {{run.steps[step].microbatches[0][0]}}, .frozen = run.steps[step].frozen}};
  return golden::train(alone, at::kDouble).front().gradients;
}

// Up to what roundings to the compute dtype may do.
bool are_alike(const golden::Named& golden, const MicrobatchTrace& unsharded) {
  for (const auto& [name, wanted] : golden) {
    const at::Tensor* const held = find_tensor(unsharded.gradients, name);
    if (!held) continue;
    const at::Tensor right = wanted.to(at::kDouble), other = held->to(at::kDouble);
    if (!(norm_of(other - right) <= 1e-3 * norm_of(right) + 1e-6)) return false;
  }
  return true;
}

}  // namespace

TracedStep trace_step(const Case& c, const golden::Run& run, size_t step, const golden::Named& parameters) {
  const auto& rounds = run.steps[step].microbatches;
  TracedStep traced{.ranks = trace_modules(c, run, step), .golden = ModuleTraces(rounds.front().size())};
  for (const auto& round : rounds)
    for (size_t rank = 0; rank < round.size(); ++rank)
      traced.golden[rank].push_back(trace_unsharded(run.model, parameters, round[rank]));
  traced.model_is_right = are_alike(golden_gradients(run, step, parameters), traced.golden.front().front());
  return traced;
}

}  // namespace harness
