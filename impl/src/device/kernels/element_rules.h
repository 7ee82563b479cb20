// What arithmetic does with one pack of elements, on the CPU as on a GPU. A rule is called once for every pack, in any order:
// nothing that a pack does may need what another one did.
#pragma once

#include <cmath>
#include <type_traits>

#include "internal/base/counter_random.h"
#include "device/kernels/elements.h"
#include "shardproof/device/model_math.h"

namespace shardproof::SHARD_KERNELS {

struct Sum {
  template <class T>
  SHARD_HD static T apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      using U = std::make_unsigned_t<T>;  // wraps
      return static_cast<T>(static_cast<U>(static_cast<U>(a) + static_cast<U>(b)));
    } else if constexpr (sizeof(T) == 2) {
      return Narrow<T>::of(widen(a) + widen(b));
    } else {
      return a + b;
    }
  }
};

template <bool kMax>
struct Extreme {
  template <class T>
  SHARD_HD static T apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      return (kMax ? a >= b : a <= b) ? a : b;
    } else {
      const auto x = widen(a), y = widen(b);
      return is_nan(x) || (kMax ? x >= y : x <= y) ? a : b;
    }
  }
};

template <int W, class Terms>
bool all_aligned(const Terms& terms) {
  for (int k = 0; k < terms.count; ++k)
    if (!aligned<W>(terms[k])) return false;
  return true;
}

// `Terms`: the runner's list of arrays to sum, with their `count` and operator[](int).
template <class T, class Fold, class Terms>
struct ReduceRule {
  static constexpr int kWidth = sizeof(T) >= 4 ? 4 : 8;
  static constexpr int kBlock = 1024;  // elements that a CPU sums at a time: they stay in its first-level cache
  Terms terms;
  T* target;

  bool fits() const { return all_aligned<kWidth>(terms) && aligned<kWidth>(target); }
  // The target may be one of the terms, so it is written last.
  template <int W>
  SHARD_HD void pack(int64_t i) const {
    const int last = terms.count - 1;
    const auto first = look<W>(terms[0] + i);
    if (last == 0) return fill<W>(target + i, [&](int w) { return first.at[w]; });
    const auto last_term = look<W>(terms[last] + i);
    const auto finish = [&](const auto& left) {
      fill<W>(target + i, [&](int w) { return Fold::apply(left.at[w], last_term.at[w]); });
    };
    if (last == 1) return finish(first);
    const auto second = look<W>(terms[1] + i);
    Pack<T, W> sum;
    SHARD_VECTORIZE
    for (int w = 0; w < W; ++w) sum.at[w] = Fold::apply(first.at[w], second.at[w]);
#ifdef __CUDA_ARCH__
#  pragma unroll 4
#endif
    for (int k = 2; k < last; ++k) {
      const auto term = look<W>(terms[k] + i);
      SHARD_VECTORIZE
      for (int w = 0; w < W; ++w) sum.at[w] = Fold::apply(sum.at[w], term.at[w]);
    }
    finish(sum);
  }
};

template <class T, class Result, class Terms>
struct SumWideRule {
  static constexpr int kWidth = 8;
  static constexpr int kBlock = 1024;
  Terms terms;
  Result* target;

  bool fits() const { return all_aligned<kWidth>(terms) && aligned<kWidth>(target); }
  template <int W>
  SHARD_HD void pack(int64_t i) const {
    const auto first = look<W>(terms[0] + i);
    Pack<float, W> sum;
    SHARD_VECTORIZE
    for (int w = 0; w < W; ++w) sum.at[w] = static_cast<float>(widen(first.at[w]));
#ifdef __CUDA_ARCH__
#  pragma unroll 4
#endif
    for (int k = 1; k < terms.count; ++k) {
      const auto term = look<W>(terms[k] + i);
      SHARD_VECTORIZE
      for (int w = 0; w < W; ++w) sum.at[w] += static_cast<float>(widen(term.at[w]));
    }
    fill<W>(target + i, [&](int w) { return Narrow<Result>::of(sum.at[w]); });
  }
};

// One element of an update in `Real`, float or double, to which each scalar was rounded once.
template <class Real, bool kMomentum>
struct Sgd {
  static constexpr bool kFirst = kMomentum, kSecond = false;
  Real lr, decay, momentum;
  bool nesterov;
  explicit Sgd(const SgdScalars& s)
      : lr(static_cast<Real>(s.lr)),
        decay(static_cast<Real>(s.decay)),
        momentum(static_cast<Real>(s.momentum)),
        nesterov(s.nesterov) {}

  SHARD_HD void apply(Real& p, Real g, Real& m, Real&) const {
    Real direction = g;
    if (decay != 0) direction += decay * p;
    if constexpr (kMomentum) {
      m = momentum * m + direction;
      direction = nesterov ? direction + momentum * m : m;
    }
    p -= lr * direction;
  }
};

SHARD_HD float root_of(float value) {
  return sqrtf(value);
}
SHARD_HD double root_of(double value) {
  return sqrt(value);
}

template <class Real>
struct Adam {
  static constexpr bool kFirst = true, kSecond = true;
  Real keep, coupled, beta1, beta1_rest, beta2, beta2_rest, eps, rate, root;
  explicit Adam(const AdamScalars& s)
      : keep(static_cast<Real>(s.keep)),
        coupled(static_cast<Real>(s.coupled)),
        beta1(static_cast<Real>(s.beta1)),
        beta1_rest(static_cast<Real>(s.beta1_rest)),
        beta2(static_cast<Real>(s.beta2)),
        beta2_rest(static_cast<Real>(s.beta2_rest)),
        eps(static_cast<Real>(s.eps)),
        rate(static_cast<Real>(s.rate)),
        root(static_cast<Real>(s.root)) {}

  SHARD_HD void apply(Real& p, Real g, Real& m, Real& v) const {
    const Real gradient = coupled != 0 ? g + coupled * p : g;
    const Real decayed = p * keep;
    m = beta1 * m + beta1_rest * gradient;
    v = beta2 * v + beta2_rest * (gradient * gradient);
    p = decayed - rate * (m / (root_of(v) / root + eps));
  }
};

template <class Real>
struct Lion {
  static constexpr bool kFirst = true, kSecond = false;
  Real keep, lr, beta1, beta1_rest, beta2, beta2_rest;
  explicit Lion(const LionScalars& s)
      : keep(static_cast<Real>(s.keep)),
        lr(static_cast<Real>(s.lr)),
        beta1(static_cast<Real>(s.beta1)),
        beta1_rest(static_cast<Real>(s.beta1_rest)),
        beta2(static_cast<Real>(s.beta2)),
        beta2_rest(static_cast<Real>(s.beta2_rest)) {}

  SHARD_HD void apply(Real& p, Real g, Real& m, Real&) const {
    const Real decayed = p * keep;
    const Real blend = beta1 * m + beta1_rest * g;
    const Real sign = blend > 0 ? Real{1} : blend < 0 ? Real{-1} : blend;
    m = beta2 * m + beta2_rest * g;
    p = decayed - lr * sign;
  }
};

struct Nothing {
  uint16_t bits;
};
template <>
struct Narrow<Nothing> {
  SHARD_HD static Nothing of(float) { return {0}; }
};

// `Low`: of what the new parameter is rounded to besides; Nothing where it is not.
template <class Real, class Update, class Low>
struct UpdateRule {
  static constexpr bool kLow = !std::is_same_v<Low, Nothing>;
  static constexpr int kWidth = kLow ? 8 : 4;
  static constexpr bool kComputes = true;  // roots and divisions
  Update update;
  Real* parameter;
  const Real* gradient;
  Real *first, *second;
  Low* low;

  UpdateRule(const Update& rule, const UpdateArrays& arrays)
      : update(rule),
        parameter(static_cast<Real*>(arrays.parameter)),
        gradient(static_cast<const Real*>(arrays.gradient)),
        first(static_cast<Real*>(arrays.first)),
        second(static_cast<Real*>(arrays.second)),
        low(static_cast<Low*>(arrays.low)) {}

  bool fits() const {
    return aligned<kWidth>(parameter) && aligned<kWidth>(gradient) && aligned<kWidth>(first) && aligned<kWidth>(second) &&
           (!kLow || aligned<kWidth>(low));
  }
  template <int W>
  SHARD_HD void pack(int64_t i) const {
    Pack<Real, W> p = load<W>(parameter + i), m{}, v{};
    const Pack<Real, W> g = load<W>(gradient + i);
    if constexpr (Update::kFirst) m = load<W>(first + i);
    if constexpr (Update::kSecond) v = load<W>(second + i);
    for (int w = 0; w < W; ++w) update.apply(p.at[w], g.at[w], m.at[w], v.at[w]);
    keep<W>(parameter + i, p);
    if constexpr (Update::kFirst) keep<W>(first + i, m);
    if constexpr (Update::kSecond) keep<W>(second + i, v);
    if constexpr (kLow) {
      Pack<Low, W> rounded;
      for (int w = 0; w < W; ++w) rounded.at[w] = Narrow<Low>::of(p.at[w]);
      keep<W>(low + i, rounded);
    }
  }
};

template <class T>
struct StoreRule {
  static constexpr int kWidth = sizeof(T) >= 4 ? 4 : 8;
  float* target;
  const T* source;
  bool add;

  bool fits() const { return aligned<kWidth>(target) && aligned<kWidth>(source); }
  template <int W>
  SHARD_HD void pack(int64_t i) const {
    const Pack<T, W> given = load<W>(source + i);
    Pack<float, W> result;
    if (add) result = load<W>(target + i);
    for (int w = 0; w < W; ++w) {
      const auto term = static_cast<float>(widen(given.at[w]));
      result.at[w] = add ? result.at[w] + term : term;
    }
    keep<W>(target + i, result);
  }
};

// Of float32, in place: divided, or multiplied.
template <bool kDivide>
struct ScaleRule {
  static constexpr int kWidth = 4;
  float* values;
  float by;

  bool fits() const { return aligned<kWidth>(values); }
  template <int W>
  SHARD_HD void pack(int64_t i) const {
    Pack<float, W> x = load<W>(values + i);
    for (int w = 0; w < W; ++w) x.at[w] = kDivide ? x.at[w] / by : x.at[w] * by;
    keep<W>(values + i, x);
  }
};

struct FixedToFloatRule {
  static constexpr int kWidth = 4;
  static constexpr bool kComputes = true;  // conversions
  float* target;
  const int64_t* source;
  float unit;

  bool fits() const { return aligned<kWidth>(target) && aligned<kWidth>(source); }
  template <int W>
  SHARD_HD void pack(int64_t i) const {
    const Pack<int64_t, W> from = load<W>(source + i);
    Pack<float, W> to;
    for (int w = 0; w < W; ++w) to.at[w] = static_cast<float>(from.at[w]) * unit;
    keep<W>(target + i, to);
  }
};

// The place in the matrix is found once a pack, because a division takes longer than the rest.
template <class T>
struct MaskRule {
  static constexpr int kWidth = sizeof(T) >= 4 ? 4 : 8;
  static constexpr int kBlock = 1024;
  T* target;
  const int64_t *rows, *columns;
  int64_t column_count, length;
  uint64_t key, dropped_below;
  T dropped, kept;

  bool fits() const { return aligned<kWidth>(target); }
  template <int W>
  SHARD_HD void pack(int64_t i) const {
    int64_t row = i / column_count, column = i - row * column_count, begin = rows[row] * length;
    Pack<T, W> values;
    for (int w = 0; w < W; ++w) {
      if (column == column_count) {
        column = 0;
        begin = rows[++row] * length;
      }
      const auto index = static_cast<uint64_t>(begin + columns[column++]);
      values.at[w] = counter_mix(key ^ index) >> 32 < dropped_below ? dropped : kept;
    }
    keep<W>(target + i, values);
  }
};

// Ties to even.
SHARD_HD int64_t nearest_integer(double value) {
#ifdef __CUDACC__
  return llrint(value);
#else
  return static_cast<int64_t>(nearbyint(value));  // the same, of what fits, and there are vectors of it
#endif
}

// Rules that look for something return the first place in the pack where it is, W where it is not.

template <class T>
struct StoreFixedRule {
  static constexpr int kWidth = 1;
  int64_t* target;
  const T* source;
  bool add;
  double units_in_one;  // a power of two, by which products and quotients have the same bits
  double limit, limit_of_sums;

  bool fits() const { return false; }  // one by one: memory is not what it waits for
  template <int W>
  SHARD_HD int pack(int64_t i) const {
    static_assert(W == 1);
    int64_t term = 0;
    bool fits = true;
    if constexpr (std::is_integral_v<T>) {
      term = source[i];
    } else {
      const double value = widen(source[i]);
      fits = fabs(value) < limit;  // not so for NaN
      term = nearest_integer(fits ? value * units_in_one : 0.0);
    }
    const int64_t sum = add ? target[i] + term : term;  // new memory is not read: that would cost a page fault more
    target[i] = sum;
    const bool sum_fits = fabs(static_cast<double>(sum)) < limit_of_sums * units_in_one;
    return static_cast<int>(fits) & static_cast<int>(sum_fits);
  }
};

}  // namespace shardproof::SHARD_KERNELS
