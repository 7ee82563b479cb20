// Trains a case with the library under test.
#pragma once

#include <vector>

#include "golden/golden.h"
#include "harness/case.h"
#include "harness/step_exchange.h"

namespace harness {

// [step][rank]. Rank 0 begins with the run's parameters, the other ranks with different ones, which the library has to
// replace. The order in which ranks run, and when collectives complete, follow from the case's seed.
// `output_scale` multiplies what the model gives, before the loss: an error to be found.
std::vector<std::vector<RankStep>> run_sharded(const Case& c, const golden::Run& run, double output_scale = 1);

}  // namespace harness
