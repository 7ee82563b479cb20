#include "flat_math.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace shardproof {

void add_to(float* __restrict target, const float* __restrict source, int64_t count) {
  for (int64_t i = 0; i < count; ++i) target[i] += source[i];
}

void divide_by(float* values, float divisor, int64_t count) {
  for (int64_t i = 0; i < count; ++i) values[i] /= divisor;
}

void scale_by(float* values, float factor, int64_t count) {
  for (int64_t i = 0; i < count; ++i) values[i] *= factor;
}

int64_t first_nonfinite(const float* values, int64_t count) {
  constexpr int64_t kBlock = 4096;
  constexpr uint32_t kExponent = 0x7f800000;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t end = std::min(count, begin + kBlock);
    uint32_t found = 0;
    for (int64_t i = begin; i < end; ++i) found |= (std::bit_cast<uint32_t>(values[i]) & kExponent) == kExponent;
    if (!found) continue;
    for (int64_t i = begin; i < end; ++i)
      if (!std::isfinite(values[i])) return i;
  }
  return count;
}

}  // namespace shardproof
