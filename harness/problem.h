// What a case trains on: initial parameters and data, as the golden run takes them.
#pragma once

#include <ATen/core/Tensor.h>

#include "golden/golden.h"
#include "harness/case.h"

namespace harness {

// Parameters, data of every step, round and rank, and the order of sums that the strategy prescribes. Every microbatch has
// its own number of samples and, for a GPT, its own length; every rank has different data. In `exact` mode all values are
// small integers, so that each sum is exact in any order.
golden::Run make_run(const Case& c);

}  // namespace harness
