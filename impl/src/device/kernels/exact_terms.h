// Floats as terms of the exact sums of device/device_math.h.
#pragma once

#include <cstdint>

#include "device/kernels/elements.h"

namespace shardproof::SHARD_KERNELS {

// A float, or its square, as a term of an exact sum: an integer below 2^48, of the power of two that its exponent gives.
struct ExactInteger {
  uint32_t exponent;
  uint64_t integer;
};
SHARD_HD ExactInteger exact_integer(float value, bool square) {
  const uint32_t bits = bits_of<uint32_t>(value), exponent = bits >> 23 & 0xff;
  const uint64_t significand = (bits & 0x7fffff) | (exponent != 0 ? 0x800000u : 0u);
  return {exponent, square ? significand * significand : significand};
}

// The integer in limbs of 16 bits, for counters of 32 bits, which hold 2^16 - 1 terms.
constexpr int kLimbs = 3;
constexpr int64_t kTermsInCounters = 0xffff;

struct ExactTerm {
  uint32_t exponent;
  uint32_t limb[kLimbs];
};
SHARD_HD ExactTerm exact_term(float value, bool square) {
  const auto [exponent, integer] = exact_integer(value, square);
  return {exponent,
          {static_cast<uint32_t>(integer & 0xffff), static_cast<uint32_t>(integer >> 16 & 0xffff),
           static_cast<uint32_t>(integer >> 32)}};
}

// What limbs of one exponent that were added up mean in the counters of ExactSum, low and high. Their sum,
// l0 + 2^16 l1 + 2^32 l2, has more than 64 bits from 2^16 terms on, so the parts are taken first.
SHARD_HD uint64_t low_part(uint64_t l0, uint64_t l1) {
  return (l0 + (l1 << 16)) & 0xffffff;
}
SHARD_HD uint64_t high_part(uint64_t l0, uint64_t l1, uint64_t l2) {
  return ((l0 + (l1 << 16)) >> 24) + (l2 << 8);
}

}  // namespace shardproof::SHARD_KERNELS
