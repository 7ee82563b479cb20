// Terms of sums that no order and no cut can change: each is rounded to a multiple of 2^-40, and they are added as integers.
// The CPU and the kernels of a GPU both include this.
//
// A term must be below 128 in magnitude, and a sum may have 2^16 - 1 of them, so that integers never overflow. Whether a run
// keeps to that does not depend on how it is cut.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "base/on_device.h"

namespace shardproof::fixed {

constexpr double kUnit = 0x1p-40, kUnits = 0x1p40;
constexpr double kTermMax = 128;
constexpr int64_t kTermsMax = (int64_t{1} << 16) - 1;
// What a double holds exactly.
constexpr double kTotalMax = 0x1p13;

// The nearest multiple, ties to even; never -0.
SHARD_ON_DEVICE inline double grid(double value) {
  return nearbyint(value * kUnits) * kUnit + 0.0;
}

// Adding this makes an operation round to units. The bits of the result are then the units plus kShiftBits.
constexpr double kShift = 0x1.8p12;
constexpr uint64_t kShiftBits = 0x40b8000000000000;
static_assert(std::bit_cast<uint64_t>(kShift) == kShiftBits);

// The term x y. It is rounded once, from the exact product to the nearest multiple, ties to even.
SHARD_ON_DEVICE inline uint64_t shifted_product(double x, double y) {
  const double shifted = fma(x, y, kShift);
  uint64_t bits;
  memcpy(&bits, &shifted, sizeof(bits));
  return bits;
}
// The same in units, as an integer modulo 2^64.
SHARD_ON_DEVICE inline uint64_t units_of_product(double x, double y) {
  return shifted_product(x, y) - kShiftBits;
}
// Whether these units came from a term that is not in [-128, 128): zero where it is. NaN is not.
SHARD_ON_DEVICE inline uint64_t beyond(uint64_t units) {
  return (units + (uint64_t{1} << 47)) >> 48;
}

SHARD_ON_DEVICE inline double value(uint64_t sum) {
  return static_cast<double>(static_cast<int64_t>(sum)) * kUnit;
}

}  // namespace shardproof::fixed
