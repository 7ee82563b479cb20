// Comparison in `fast` mode, where the backend adds in an order of its own.
//
// The tolerance is derived: the same run in float64 is the truth, and a tensor of the sharded run may be at most
// kToleranceFactor times as far from it, in the Frobenius norm, as unsharded float32 runs are: those with other orders of
// sums, and some from parameters that are one float off, whichever is farthest. There is no absolute tolerance, which would
// pass a doubled gradient once gradients are small. What is zero in the truth and in every float32 run has to be zero; in low
// precision a tensor that is zero in the truth, but for float64's rounding, counts beside all tensors of its kind in that step.
// Not so a parameter that is frozen: it may be off by rounding, however far others move.
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

// Calibrated on healthy cases; docs/testing.md has the figures.
constexpr double kToleranceFactor = 8;
// A run can be closer to the truth by luck than its numbers can express: closer than this, as a part of the norm of the truth,
// counts as this. Of the dtype that the model computes in; parameters have that floor for what the step changed in them.
constexpr double distance_floor(at::ScalarType compute) {
  return compute == at::kBFloat16 ? 0x1p-7 : compute == at::kHalf ? 0x1p-10 : 0x1p-23;
}

// How far apart numbers of that dtype are around zero. A gradient that is computed in it may be off by this much in each
// element, however small it is: float16 has no smaller numbers, and sums over ranks round in more places than one sum does. In
// other dtypes it is too small to matter.
constexpr double spacing_around_zero(at::ScalarType compute) {
  return compute == at::kHalf ? 0x1p-24 : 0;
}

// What a step is measured by.
struct Unsharded {
  const golden::StepTrace& truth;
  const golden::Named& before;                      // parameters of the truth before the step
  std::vector<const golden::StepTrace*> references;  // float32 runs
};

// The first tensor of the step that is too far off, with its worst element, or nothing. `ratio_max` grows to the largest ratio
// of distances seen. Of each element the rank that is farthest off counts; pieces must tile every tensor as in
// `first_difference`, and what is not finite is never near. Adds the number of values compared to `*compared`.
FoundDifference first_beyond_tolerance(const Unsharded& unsharded, const std::vector<RankStep>& ranks, const Copies& copies,
                                       double* ratio_max, int64_t* compared);

// The parameter of a step that may be off by the smallest part of its norm: where a planted change has to be noticed.
size_t best_known_parameter(const Unsharded& unsharded, at::ScalarType compute);

}  // namespace harness
