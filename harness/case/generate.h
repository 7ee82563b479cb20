// Random cases, valid by construction. A case is a function of (seed, index) and of the limits alone.
#pragma once

#include <cstdint>

#include "harness/case/case.h"
#include "harness/case/limits.h"

namespace harness {

// Most features are left out of most cases (swarm testing), so that each also occurs without the others. Sizes are small,
// odd, prime and below the world size; adamw stands beside sgd, because AdamW hides a wrong factor on gradients.
Case generate(uint64_t seed, int64_t index, const Limits& limits);

}  // namespace harness
