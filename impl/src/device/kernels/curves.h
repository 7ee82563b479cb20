// The functions of canonical arithmetic that are no IEEE operation. Each is a fixed sequence of additions, multiplications and
// divisions of float64, so that it has the same bits on every processor and on a GPU, which no two libraries of C promise.
// docs/canonical.md has the sequences. The CPU and the kernels of a GPU both include this, and neither may contract.
#pragma once

#include <cstdint>
#include <limits>

#include "device/kernels/elements.h"

namespace shardproof::SHARD_KERNELS::curves {

// The natural logarithm of 2, in a part of 40 binary digits and the rest. A multiple of the first by an exponent is exact.
constexpr double kLn2 = 0x1.62e42fefa2p-1, kLn2Rest = 0x1.9ef35793c7673p-41, kPerLn2 = 0x1.71547652b82fep+0;
// Adding this makes an addition round to integers, which the last bits of the sum then are.
constexpr double kToInteger = 0x1.8p52;

// From the coefficient of the highest power of x to that of the lowest: one multiplication and one addition for each.
template <class... Coefficients>
SHARD_HD double polynomial(double x, double highest, Coefficients... others) {
  double sum = highest;
  ((sum = sum * x + others), ...);
  return sum;
}

// e^x, within 2^-51 of its size; 0 below -708 and infinite above 709.
SHARD_HD double exp(double x) {
  const double clamped = x > 709 ? 709.0 : x < -708 ? -708.0 : x;
  const double shifted = clamped * kPerLn2 + kToInteger, power = shifted - kToInteger;
  const double rest = (clamped - power * kLn2) - power * kLn2Rest;  // at most ln(2) / 2
  // The first terms of the series, with the coefficients 1 / k!.
  const double series = polynomial(rest, 1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880,
                                   1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0);
  const double scaled = series * bits_of<double>((bits_of<uint64_t>(shifted) + 1023) << 52);
  return x > 709 ? std::numeric_limits<double>::infinity() : x < -708 ? 0.0 : scaled;  // NaN stays NaN
}

// The natural logarithm of a normal number above 0, within 2^-51 of the larger of 1 and its size.
SHARD_HD double log(double x) {
  const uint64_t bits = bits_of<uint64_t>(x);
  const bool upper = (bits & 0xfffffffffffff) > 0x6a09e667f3bcd;  // the significand is above the root of 2
  const double significand = bits_of<double>((bits & 0xfffffffffffff) | (upper ? 0x3fe0000000000000 : 0x3ff0000000000000));
  const double power = static_cast<double>(static_cast<int64_t>(bits >> 52) - (upper ? 1022 : 1023));
  // log((1 + s) / (1 - s)) = 2 (s + s^3 / 3 + s^5 / 5 + ...)
  const double s = (significand - 1) / (significand + 1), square = s * s;
  const double series = polynomial(square, 1.0 / 23, 1.0 / 21, 1.0 / 19, 1.0 / 17, 1.0 / 15, 1.0 / 13, 1.0 / 11, 1.0 / 9,
                                   1.0 / 7, 1.0 / 5, 1.0 / 3, 1.0);
  return power * kLn2 + (power * kLn2Rest + 2 * s * series);
}

// Within 2^-51.
SHARD_HD double tanh(double x) {
  const double part = exp(-2 * (x < 0 ? -x : x)), size = (1 - part) / (1 + part);
  return x < 0 ? -size : size;
}

// What the normal distribution has below x, (1 + erf(x / sqrt(2))) / 2, within 2^-50.
SHARD_HD double normal_below(double x) {
  const double y = (x < 0 ? -x : x) * 0.7071067811865476;  // sqrt(1/2)
  // erfc(y) e^(y^2) for y in [0, 6], as a polynomial of (y - 4) / (y + 4): the Chebyshev interpolation of degree 18, written
  // in powers. It is within 2^-57. Beyond 6, erfc is below 2^-55.
  const double over_exp = polynomial(
      (y - 4) / (y + 4), -0x1.50c15ad8717c1p-28, -0x1.53cc373214aa6p-23, -0x1.e54a3c8314bb1p-21, -0x1.50e8eeb0e048dp-20,
      0x1.2a085542c8f38p-19, -0x1.332fe05423826p-19, -0x1.7c3ffbcf0dc15p-16, 0x1.4b4801b8087b6p-14, -0x1.6ce9ff07f389cp-16,
      -0x1.a2f895d9e865ep-11, 0x1.0a17eb344e0e5p-8, -0x1.a4ded464e5de0p-7, 0x1.0066e102a2502p-5, -0x1.027d574489e2fp-4,
      0x1.be502c365eef5p-4, -0x1.506666f69e78cp-3, 0x1.bff01a5f907fcp-3, -0x1.0949227374319p-2, 0x1.18932bf08e154p-3);
  const double tail = y > 6 ? 0.0 : 0.5 * (exp(-(y * y)) * over_exp);
  return x < 0 ? tail : 1 - tail;
}

}  // namespace shardproof::SHARD_KERNELS::curves
