// Comparison in `fast` mode, where the backend adds in an order of its own.
//
// The tolerance is derived: the same run in float64 is the truth, and a tensor of the sharded run may be at most
// kToleranceFactor times as far from it, in relative Frobenius norm, as unsharded float32 runs are: those with either order of
// sums, whichever is farther. There is no absolute tolerance: it would pass a doubled gradient once gradients are small.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "golden/golden.h"
#include "harness/step_exchange.h"

namespace harness {

// Calibrated on healthy cases; docs/testing.md has the figures.
constexpr double kToleranceFactor = 16;
// A float32 run can be closer to the truth by luck than float32 can express: below this relative distance it counts as this.
constexpr double kDistanceFloor = 0x1p-23;

// The first tensor of the step that is too far off, in words, or nothing. `ratio_max` grows to the largest ratio of
// distances seen. All ranks' pieces of a tensor are put together; replicas must agree bit for bit.
std::optional<std::string> first_beyond_tolerance(const golden::StepTrace& truth,
                                                  const std::vector<const golden::StepTrace*>& references,
                                                  const std::vector<RankStep>& ranks, double* ratio_max);

}  // namespace harness
