// Compares what the ranks of one training step say with the golden step, bit for bit.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "golden/golden.h"
#include "harness/compare/difference.h"
#include "harness/compare/pieces.h"
#include "harness/compare/step_exchange.h"

namespace harness {

// The first difference, or nothing. An evaluation comes first, then losses, the
// norm, buffers, gradients, optimizer state, parameters: the order in which a step makes them, so the first difference is
// nearest to the cause. Every replica on every rank is compared. It is also a difference when a value is not finite, when an
// element is held by more or fewer ranks than `copies` says, or when one side has a tensor or a loss that the other
// lacks. Under tensor parallelism -0 is +0. Adds the number of values compared to `*compared`.
FoundDifference first_difference(const golden::StepTrace& golden, const std::vector<RankStep>& ranks, Copies copies,
                                 int64_t* compared);

}  // namespace harness
