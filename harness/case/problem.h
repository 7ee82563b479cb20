// What a case trains on: initial parameters and data, as the golden run takes them.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "golden/golden.h"
#include "harness/case/case.h"

namespace harness {

// Parameters, data of every step, round and rank, and the order of sums that the strategy prescribes. Every microbatch has
// its own number of samples and, for a GPT, its own length; every rank has different data. In `exact` mode all values are
// small integers, so that each sum is exact in any order.
golden::Run make_run(const Case& c);

// Whether some microbatches use a parameter that others do not: a module with it cannot be a unit, which all ranks enter or
// none.
bool branches_differ(const Case& c);

// Which rounds of a step end with a sum over ranks, as golden::Step::reduce_after says it: those that the strategy adds up
// locally do not, nor does anything when there is one rank to add.
std::vector<bool> reductions(const Case& c, const StepPlan& plan);

}  // namespace harness
