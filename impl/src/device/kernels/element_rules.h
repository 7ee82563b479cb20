// What each kernel does with one pack of elements. A rule is called once for every pack, in any order.
#pragma once

#include <cmath>
#include <type_traits>

#include "device/kernels/elements.h"
#include "shardproof/device/device_math.h"

namespace shardproof::kernels {

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

template <class T>
struct Terms {
  const T* at[DeviceMath::kTermsMax];
  int count;

  template <int W>
  bool fit() const {
    for (int k = 0; k < count; ++k)
      if (!aligned<W>(at[k])) return false;
    return true;
  }
};

template <class T, class Fold>
struct ReduceRule {
  static constexpr int kWidth = sizeof(T) >= 4 ? 4 : 8;
  Terms<T> terms;
  T* target;

  bool fits() const { return terms.template fit<kWidth>() && aligned<kWidth>(target); }
  template <int W>
  SHARD_HD void pack(int64_t i) const {
    Pack<T, W> sum = load<W>(terms.at[0] + i);
#ifdef __CUDA_ARCH__
#  pragma unroll 4
#endif
    for (int k = 1; k < terms.count; ++k) {
      const Pack<T, W> term = load<W>(terms.at[k] + i);
      for (int w = 0; w < W; ++w) sum.at[w] = Fold::apply(sum.at[w], term.at[w]);
    }
    keep<W>(target + i, sum);
  }
};

template <class T, class Result>
struct SumWideRule {
  static constexpr int kWidth = 8;
  Terms<T> terms;
  Result* target;

  bool fits() const { return terms.template fit<kWidth>() && aligned<kWidth>(target); }
  template <int W>
  SHARD_HD void pack(int64_t i) const {
    const Pack<T, W> first = load<W>(terms.at[0] + i);
    float sum[W];
    for (int w = 0; w < W; ++w) sum[w] = widen(first.at[w]);
#ifdef __CUDA_ARCH__
#  pragma unroll 4
#endif
    for (int k = 1; k < terms.count; ++k) {
      const Pack<T, W> term = load<W>(terms.at[k] + i);
      for (int w = 0; w < W; ++w) sum[w] += widen(term.at[w]);
    }
    Pack<Result, W> rounded;
    for (int w = 0; w < W; ++w) rounded.at[w] = Narrow<Result>::of(sum[w]);
    keep<W>(target + i, rounded);
  }
};

// One element of an update: the same operations in the same order as impl/src/optim/update_rules.cpp.
struct Sgd {
  SgdScalars s;
  static constexpr bool kSecond = false;
  SHARD_HD void apply(float& p, float g, float* m, float*) const {
    float direction = g;
    if (s.decay != 0) direction += s.decay * p;
    if (m) {
      *m = s.momentum * *m + direction;
      direction = s.nesterov ? direction + s.momentum * *m : *m;
    }
    p -= s.lr * direction;
  }
};

struct Adam {
  AdamScalars s;
  static constexpr bool kSecond = true;
  SHARD_HD void apply(float& p, float g, float* m, float* v) const {
    const float gradient = s.coupled != 0 ? g + s.coupled * p : g;
    const float decayed = p * s.keep;
    *m = s.beta1 * *m + s.beta1_rest * gradient;
    *v = s.beta2 * *v + s.beta2_rest * (gradient * gradient);
    p = decayed - s.rate * (*m / (sqrtf(*v) / s.root + s.eps));
  }
};

struct Lion {
  LionScalars s;
  static constexpr bool kSecond = false;
  SHARD_HD void apply(float& p, float g, float* m, float*) const {
    const float decayed = p * s.keep;
    const float blend = s.beta1 * *m + s.beta1_rest * g;
    const float sign = blend > 0 ? 1.0f : blend < 0 ? -1.0f : blend;
    *m = s.beta2 * *m + s.beta2_rest * g;
    p = decayed - s.lr * sign;
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
template <class Update, class Low>
struct UpdateRule {
  static constexpr bool kLow = !std::is_same_v<Low, Nothing>;
  static constexpr int kWidth = kLow ? 8 : 4;
  Update update;
  UpdateArrays a;

  bool fits() const {
    return aligned<kWidth>(a.parameter) && aligned<kWidth>(a.gradient) && aligned<kWidth>(a.first) &&
           aligned<kWidth>(a.second) && (!kLow || aligned<kWidth>(static_cast<Low*>(a.low)));
  }
  template <int W>
  SHARD_HD void pack(int64_t i) const {
    Pack<float, W> p = load<W>(a.parameter + i), m{}, v{};
    const Pack<float, W> g = load<W>(a.gradient + i);
    if (a.first) m = load<W>(a.first + i);
    if constexpr (Update::kSecond) v = load<W>(a.second + i);
    for (int w = 0; w < W; ++w) update.apply(p.at[w], g.at[w], a.first ? &m.at[w] : nullptr, &v.at[w]);
    keep<W>(a.parameter + i, p);
    if (a.first) keep<W>(a.first + i, m);
    if constexpr (Update::kSecond) keep<W>(a.second + i, v);
    if constexpr (kLow) {
      Pack<Low, W> low;
      for (int w = 0; w < W; ++w) low.at[w] = Narrow<Low>::of(p.at[w]);
      keep<W>(static_cast<Low*>(a.low) + i, low);
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

// Rules that look for something return the first place in the pack where it is, W where it is not.

template <class T>
struct StoreFixedRule {
  static constexpr int kWidth = 1;
  int64_t* target;
  const T* source;
  bool add;
  double unit, limit, limit_of_sums;

  bool fits() const { return false; }  // one by one: memory is not what it waits for
  template <int W>
  SHARD_HD int pack(int64_t i) const {
    static_assert(W == 1);
    int64_t term = 0;
    if constexpr (std::is_integral_v<T>) {
      term = source[i];
    } else {
      const double value = widen(source[i]);
      if (!(fabs(value) < limit)) return 0;  // NaN, too
      term = llrint(value / unit);
    }
    target[i] = add ? target[i] + term : term;
    return fabs(static_cast<double>(target[i])) < limit_of_sums / unit ? 1 : 0;
  }
};

template <class T>
struct BeyondRule {
  static constexpr int kWidth = sizeof(T) >= 4 ? 4 : 8;
  const T* values;
  double limit;

  bool fits() const { return aligned<kWidth>(values); }
  template <int W>
  SHARD_HD int pack(int64_t i) const {
    const Pack<T, W> x = load<W>(values + i);
    int first = W;
    for (int w = W - 1; w >= 0; --w) {
      double value;
      if constexpr (std::is_integral_v<T>)
        value = static_cast<double>(x.at[w]);
      else
        value = widen(x.at[w]);
      if (!(fabs(value) <= limit)) first = w;
    }
    return first;
  }
};

template <class T>
struct NotZeroRule {
  static constexpr int kWidth = sizeof(T) >= 4 ? 4 : 8;
  const T* values;

  bool fits() const { return aligned<kWidth>(values); }
  template <int W>
  SHARD_HD int pack(int64_t i) const {
    const Pack<T, W> x = load<W>(values + i);
    int first = W;
    for (int w = W - 1; w >= 0; --w) {
      if constexpr (std::is_integral_v<T>) {
        if (x.at[w] != 0) first = w;
      } else {
        if (!(widen(x.at[w]) == 0)) first = w;
      }
    }
    return first;
  }
};

// A float as an integer term of an exact sum: limbs of 16 bits, counted by exponent. 32-bit counters hold 2^16 - 1 terms.
constexpr int kLimbs = 3;
constexpr int64_t kTermsInCounters = 0xffff;

struct ExactTerm {
  uint32_t exponent;
  uint32_t limb[kLimbs];
};
SHARD_HD ExactTerm exact_term(float value, bool square) {
  const uint32_t bits = bits_of<uint32_t>(value), exponent = bits >> 23 & 0xff;
  const uint64_t significand = (bits & 0x7fffff) | (exponent != 0 ? 0x800000u : 0u);
  const uint64_t integer = square ? significand * significand : significand;
  return {exponent,
          {static_cast<uint32_t>(integer & 0xffff), static_cast<uint32_t>(integer >> 16 & 0xffff),
           static_cast<uint32_t>(integer >> 32)}};
}

// What limbs of one exponent that were added up mean in the counters of ExactSum, low and high.
SHARD_HD uint64_t low_part(uint64_t l0, uint64_t l1, uint64_t l2) {
  return (l0 + (l1 << 16) + (l2 << 32)) & 0xffffff;
}
SHARD_HD uint64_t high_part(uint64_t l0, uint64_t l1, uint64_t l2) {
  return (l0 + (l1 << 16) + (l2 << 32)) >> 24;
}

}  // namespace shardproof::kernels
