// Sums whose terms are each rounded to a multiple of 2^-40 and added as integers: no order and no cut changes a bit.
//
// A term must be below 128 in magnitude and a sum may have 2^16 - 1 of them, so that integers never overflow; whether a run
// keeps to that does not depend on how it is cut.
#pragma once

#include <ATen/core/Tensor.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <string>

namespace shardproof::fixed {

constexpr double kUnit = 0x1p-40, kUnits = 0x1p40;
constexpr double kTermMax = 128;
constexpr int64_t kTermsMax = (int64_t{1} << 16) - 1;
// What a double holds exactly.
constexpr double kTotalMax = 0x1p13;

// The nearest multiple, ties to even; never -0.
inline double grid(double value) {
  return std::nearbyint(value * kUnits) * kUnit + 0.0;
}

// Of one kind of sum: remembers whether any term was out of range.
class Terms {
 public:
  // The term in units, as an integer modulo 2^64. Adding a number whose last bit is a unit makes the addition round.
  uint64_t units(double term) {
    constexpr double kShift = 0x1.8p12;
    constexpr uint64_t kHalfRange = uint64_t{1} << 47;
    const uint64_t rounded = std::bit_cast<uint64_t>(term + kShift) - std::bit_cast<uint64_t>(kShift);
    beyond_ |= (rounded + kHalfRange) >> 48;
    return rounded;
  }
  // Of a value that is a multiple already.
  int64_t exact_units(double value) {
    const bool fits = std::abs(value) < kTotalMax;  // false for NaN
    beyond_ |= !fits;
    return fits ? static_cast<int64_t>(std::nearbyint(value * kUnits)) : 0;
  }
  bool fit() const { return beyond_ == 0; }
  // Throws NonFiniteError naming what was computed.
  void require_fit(const std::string& what) const;

 private:
  uint64_t beyond_ = 0;
};

inline double value(uint64_t sum) {
  return static_cast<double>(static_cast<int64_t>(sum)) * kUnit;
}

// Throws Error.
void require_terms(int64_t count, const std::string& what);

// a [rows, n] times b [n, columns], both float64.
at::Tensor product(const at::Tensor& a, const at::Tensor& b, const std::string& what);
// x [rows, n] -> [n].
at::Tensor sum_of_rows(const at::Tensor& x, const std::string& what);

// Between float64 that holds multiples of the unit and int64 in units, for sums over ranks.
at::Tensor to_units(const at::Tensor& values, const std::string& what);
at::Tensor from_units(const at::Tensor& units);

// Throws Error unless it is float64; contiguous.
at::Tensor require_double(const at::Tensor& x, const std::string& what);

}  // namespace shardproof::fixed
