// The elementwise sums, maxima and minima of collectives: own loops, so that their order and rounding are ours alone.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "shardproof/base/reduce.h"
#include "shardproof/device/device_math.h"

namespace shardproof {

// Whether `reduce_terms` knows the dtype: float32, float64, bfloat16, float16, int32, int64, uint8.
bool can_reduce(at::ScalarType dtype);

// target[i] = ((terms[0][i] + terms[1][i]) + terms[2][i]) + ..., each addition rounded to the dtype; integers wrap. Max and
// min keep the first of equal terms and the first NaN. `target` may be one of the terms, else must not overlap them.
// Law: an element's result depends on its own terms only, not on where it lies or on `count`.
void reduce_terms(at::ScalarType dtype, Reduce op, const std::vector<const std::byte*>& terms, int64_t count,
                  std::byte* target);
// The same on the memory that `math` works on; null: the CPU's.
void reduce_terms(const DeviceMath* math, at::ScalarType dtype, Reduce op, const std::vector<const std::byte*>& terms,
                  int64_t count, std::byte* target);

}  // namespace shardproof
