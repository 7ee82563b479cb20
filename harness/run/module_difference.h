// Where a failing step first goes wrong: what the modules of each rank read and gave, beside the same microbatches on the
// unsharded model.
#pragma once

#include <string>

#include "golden/golden.h"
#include "harness/case/case.h"
#include "harness/run/sharded_run.h"

namespace harness {

struct ModuleDifference {
  // "microbatch 0: layers.1 reads another layers.1.weight in the forward on rank 1 of 2, after all_gather of unit 'layers.1' in
  // 'dp_shard'"; that no module differs is said as well. "" where ranks could not be watched.
  std::string where;
  std::string guess;  // "" where no module differs, or nothing more can be said
};

// What modules did in one step, on the ranks and on the unsharded model.
struct TracedStep {
  ModuleTraces ranks;   // [rank][round]
  ModuleTraces golden;  // [data-parallel rank][round]
  // Whether the unsharded model has the gradients of the golden functions. Else the mistake is in the model.
  bool model_is_right = true;
};

// Trains the case once more on rank-threads up to the end of this step, and each of the step's microbatches unsharded with
// `parameters`, those that the golden step begins with. Throws what the ranks throw.
TracedStep trace_step(const Case& c, const golden::Run& run, size_t step, const golden::Named& parameters);

// Compares modules in the order in which they run, the forward of a microbatch first. A part is compared with the part of the
// unsharded tensor that it should be, and left out where that is not plain. `earlier`
// are the parameters of the step before; null in the first step.
ModuleDifference module_difference(const Case& c, const golden::Step& step, const TracedStep& traced,
                                   const golden::Named* earlier);

}  // namespace harness
