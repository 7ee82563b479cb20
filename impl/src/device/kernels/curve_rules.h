// The curves of canonical arithmetic (device/kernels/curves.h) as rules, an element a pack.
#pragma once

#include "internal/base/fixed_terms.h"
#include "device/kernels/curves.h"
#include "device/kernels/elements.h"

namespace shardproof::SHARD_KERNELS {

struct Log {
  static SHARD_HD double value(double x) { return curves::log(x); }
};

struct Grid {
  static SHARD_HD double value(double x) { return fixed::grid(x); }
};

struct Tanh {
  static SHARD_HD double value(double x) { return fixed::grid(curves::tanh(x)); }
  static SHARD_HD double derivative(double x) {
    const double y = curves::tanh(x);
    return 1 - y * y;
  }
};
struct Gelu {
  static SHARD_HD double value(double x) { return fixed::grid(x * curves::normal_below(x)); }
  static SHARD_HD double derivative(double x) {
    constexpr double kPeak = 0.3989422804014327;  // 1 / sqrt(2 pi)
    return curves::normal_below(x) + x * (curves::exp(-0.5 * x * x) * kPeak);
  }
};
struct Silu {
  static SHARD_HD double value(double x) { return fixed::grid(x / (1 + curves::exp(-x))); }
  static SHARD_HD double derivative(double x) {
    const double share = 1 / (1 + curves::exp(-x));
    return share * (1 + x * (1 - share));
  }
};

template <class Curve>
struct CurveRule {
  static constexpr int kWidth = 1;
  static constexpr bool kComputes = true;
  const double* x;
  double* y;

  bool fits() const { return false; }
  template <int W>
  SHARD_HD void pack(int64_t i) const {
    static_assert(W == 1);
    y[i] = Curve::value(x[i]);
  }
};

template <class Curve>
struct CurveBackwardRule {
  static constexpr int kWidth = 1;
  static constexpr bool kComputes = true;
  const double *x, *dy;
  double* dx;

  bool fits() const { return false; }
  template <int W>
  SHARD_HD void pack(int64_t i) const {
    static_assert(W == 1);
    dx[i] = fixed::grid(dy[i] * Curve::derivative(x[i]));
  }
};

// One row a pack, in the order of indices.
struct RowDotRule {
  static constexpr int kWidth = 1;
  const double *a, *b;
  double* out;
  int64_t width;

  bool fits() const { return false; }
  template <int W>
  SHARD_HD void pack(int64_t i) const {
    static_assert(W == 1);
    double sum = 0;
    for (int64_t j = i * width; j < (i + 1) * width; ++j) sum += a[j] * b[j];
    out[i] = sum;
  }
};

}  // namespace shardproof::SHARD_KERNELS
