// What the modules of a model did in one step: on the ranks, and on the unsharded model beside them.
#pragma once

#include "golden/golden.h"
#include "harness/case/case.h"
#include "harness/run/sharded_run.h"

namespace harness {

struct TracedStep {
  ModuleTraces ranks;   // [rank][round]
  ModuleTraces golden;  // [data-parallel rank][round]
  // Whether the unsharded model has the gradients of the golden functions. Else the mistake is in the model.
  bool model_is_right = true;
};

// Trains the case once more on rank-threads up to the end of this step, and each of the step's microbatches unsharded with
// `parameters`, those that the golden step begins with. Throws what the ranks throw.
TracedStep trace_step(const Case& c, const golden::Run& run, size_t step, const golden::Named& parameters);

}  // namespace harness
