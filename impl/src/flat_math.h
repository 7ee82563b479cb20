// Loops over contiguous floats. One IEEE operation an element each, in index order; vectorised, never reassociated.
#pragma once

#include <cstdint>

namespace shardproof {

void add_to(float* target, const float* source, int64_t count);  // target += source
void divide_by(float* values, float divisor, int64_t count);     // values /= divisor
void scale_by(float* values, float factor, int64_t count);       // values *= factor
// Index of the first NaN or infinity, `count` when there is none.
int64_t first_nonfinite(const float* values, int64_t count);

}  // namespace shardproof
