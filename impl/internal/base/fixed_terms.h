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

#include "internal/base/on_device.h"

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

SHARD_ON_DEVICE inline uint64_t bits_of(double value) {
  uint64_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// The right factor of a term: y with its last bit set. A term below 128 is then never half-way between two multiples. The
// lowest 1 bit of such a term would be 2^-41. The lowest 1 bit of a product is the product of the lowest ones of x and of the
// right factor. The right factor's is its last place, of which it is 2^52 or more, and x is at least its own. So the term would
// be 2^11 or more. (The last place of a denormal number is 2^-1074, which no x makes 2^-41.)
SHARD_ON_DEVICE inline double right_factor(double y) {
  uint64_t bits = bits_of(y);
  bits |= static_cast<uint64_t>((bits << 1) != 0);  // 0 stays: the term is 0 either way, and a denormal factor is slow
  double factor;
  memcpy(&factor, &bits, sizeof(factor));
  return factor;
}

// Sums are taken from here. A double from 4,096 to 8,192 has the unit as its last bit, so fma(x, right_factor(y), sum) adds a
// term and rounds it. As no term is half-way, the sum before it does not matter. The bits of a sum are its units plus
// kShiftBits.
constexpr double kShift = 0x1.8p12;
constexpr uint64_t kShiftBits = 0x40b8000000000000;
static_assert(std::bit_cast<uint64_t>(kShift) == kShiftBits);

// In units, as an integer modulo 2^64.
SHARD_ON_DEVICE inline uint64_t units_of_shifted(double sum) {
  return bits_of(sum) - kShiftBits;
}
SHARD_ON_DEVICE inline uint64_t units_of_product(double x, double y) {
  return units_of_shifted(fma(x, right_factor(y), kShift));
}

// Whether terms of at most this magnitude are in range by a margin. Not so for NaN.
inline bool all_fit(double largest_term) {
  return largest_term < kTermMax - 1;
}
// How many such terms a sum from kShift takes before it could leave the doubles whose last bit is the unit: 16 or more.
inline int64_t terms_of_shifted(double largest_term) {
  constexpr double kSumMax = 0x1p11 - 1;
  return static_cast<int64_t>(kSumMax / (largest_term + kUnit));
}

// Whether these units came from a term that is not in [-128, 128): zero where it is. NaN is not.
SHARD_ON_DEVICE inline uint64_t beyond(uint64_t units) {
  return (units + (uint64_t{1} << 47)) >> 48;
}

SHARD_ON_DEVICE inline double value(uint64_t sum) {
  return static_cast<double>(static_cast<int64_t>(sum)) * kUnit;
}

}  // namespace shardproof::fixed
