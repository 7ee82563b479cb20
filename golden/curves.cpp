#include "golden/curves.h"

#include <cmath>
#include <limits>
#include <vector>

namespace golden::exact {
namespace {

const double kLn2 = std::ldexp(762123384785.0, -40);  // 40 digits of ln 2
const double kLn2Rest = 7.371002565167799e-13;

// From the highest power to the lowest.
double polynomial(const std::vector<double>& coefficients, double x) {
  double sum = 0;
  for (const double coefficient : coefficients) sum = sum * x + coefficient;
  return sum;
}

// 1 / k! for k = 13 .. 0
std::vector<double> series_of_exp() {
  std::vector<double> coefficients;
  double factorial = 6227020800;
  for (int k = 13; k > 0; factorial /= k--) coefficients.push_back(1 / factorial);
  coefficients.push_back(1);
  return coefficients;
}

// 1 / k for k = 23, 21 .. 1
std::vector<double> series_of_log() {
  std::vector<double> coefficients;
  for (int k = 23; k > 0; k -= 2) coefficients.push_back(1.0 / k);
  return coefficients;
}

}  // namespace

double exp(double x) {
  static const std::vector<double> series = series_of_exp();
  if (std::isnan(x)) return x;
  if (x > 709) return std::numeric_limits<double>::infinity();
  if (x < -708) return 0;
  const double power = std::nearbyint(x * 1.4426950408889634);
  const double rest = (x - power * kLn2) - power * kLn2Rest;
  return std::ldexp(polynomial(series, rest), static_cast<int>(power));
}

double log(double x) {
  static const std::vector<double> series = series_of_log();
  int power = 0;
  double significand = 2 * std::frexp(x, &power);  // in [1, 2)
  --power;
  if (significand > 1.4142135623730951) significand /= 2, ++power;
  const double s = (significand - 1) / (significand + 1);
  return power * kLn2 + (power * kLn2Rest + 2 * s * polynomial(series, s * s));
}

double tanh(double x) {
  const double part = exp(-2 * std::abs(x)), size = (1 - part) / (1 + part);
  return std::copysign(size, x);
}

double normal_below(double x) {
  static const std::vector<double> tail_over_exp = {
      -4.900434468320478e-09,  -1.5823064242417097e-07, -9.039230380959417e-07, -1.2550871526242593e-06, 2.2205155415666436e-06,
      -2.2887216265038238e-06, -2.26646623639714e-05,   7.898361116123642e-05,  -2.1750572187611257e-05, -0.0007991238337476494,
      0.004060263560227127,    -0.012843946178505428,   0.031299056504460424,   -0.06310781563717492,    0.10896317739928547,
      -0.1642578166973262,     0.21871967891826205,     -0.2590680487601716,    0.13699945762506138};
  const double y = std::abs(x) * 0.7071067811865476;
  const double tail = y > 6 ? 0 : 0.5 * (exp(-(y * y)) * polynomial(tail_over_exp, (y - 4) / (y + 4)));
  return x < 0 ? tail : 1 - tail;
}

}  // namespace golden::exact
