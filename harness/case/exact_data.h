// Data for mode exact: small dyadic numbers with which every sum of one training step, in any order, is a float without
// rounding, so that equal bits are a fair demand on a backend that promises no order.
#pragma once

#include <cstdint>

#include "golden/golden.h"

namespace harness {

// Replaces the parameters and data of a run of one step (an MLP with identity or relu, weights powers of two) by small
// multiples of 1/2, thinned out until `bits_needed` is at most 24. Keeps shapes and weights. Throws shardproof::Error when
// no thinning is enough.
void make_exact(golden::Run& run, uint64_t seed);

// An upper bound on the bits that any sum of the step needs (forward, backward, over samples, rounds and ranks): the sum of
// its terms' absolute values, over the power of two that all of them are multiples of.
int64_t bits_needed(const golden::Run& run);

}  // namespace harness
