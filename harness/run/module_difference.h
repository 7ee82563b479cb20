// Where a failing step first goes wrong: what the modules of each rank read and gave, beside the same microbatches on the
// unsharded model.
#pragma once

#include <string>

#include "golden/golden.h"
#include "harness/case/case.h"
#include "harness/run/traced_step.h"

namespace harness {

struct ModuleDifference {
  // "microbatch 0: layers.1 reads another layers.1.weight in the forward on rank 1 of 2, after all_gather of unit 'layers.1' in
  // 'dp_shard'"; that no module differs is said as well.
  std::string where;
  std::string guess;  // "" where no module differs, or nothing more can be said
};

// Compares modules in the order in which they run, the forward of a microbatch first. A part is compared with the part of the
// unsharded tensor that it should be, and left out where that is not plain. `earlier` are the parameters of the step before, or
// null in the first step.
ModuleDifference module_difference(const Case& c, const golden::Step& step, const TracedStep& traced,
                                   const golden::Named* earlier);

}  // namespace harness
