// Rules that look for the first element of a kind, or for the largest one, and write nothing.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "device/kernels/elements.h"

namespace shardproof::SHARD_KERNELS {

// A search for the first element of a kind. The rule's `finds` says whether one element is of the kind. A GPU asks for a pack
// at a time, and a CPU for a block.
template <class T, class Rule>
struct SearchRule {
  static constexpr int kWidth = sizeof(T) >= 4 ? 4 : 8;
  const T* values;

  bool fits() const { return aligned<kWidth>(values); }
  template <int W>
  SHARD_HD int pack(int64_t i) const {
    const Pack<T, W> x = load<W>(values + i);
    int first = W;
    for (int w = W - 1; w >= 0; --w)
      if (static_cast<const Rule*>(this)->finds(x.at[w])) first = w;
    return first;
  }
};

// The bits of a magnitude. They are ordered as the numbers are, and those of NaN are above those of infinity.
template <class T>
SHARD_HD auto magnitude_bits(T value) {
  using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;
  return static_cast<Bits>(bits_of<Bits>(value) & static_cast<Bits>(static_cast<Bits>(-1) >> 1));
}

// Of a double, signed: no magnitude has the upper bit, and instructions compare signed integers.
SHARD_HD int64_t larger_magnitude(int64_t bits, double value) {
  const auto others = static_cast<int64_t>(magnitude_bits(value));
  return bits > others ? bits : others;
}

// Those of the largest T that is not above the limit. Integers are compared as doubles.
template <class T>
auto largest_within(double limit) {
  if constexpr (std::is_integral_v<T>) {
    return limit;
  } else if constexpr (std::is_same_v<T, double>) {
    return magnitude_bits(limit);
  } else {
    const float clamped = static_cast<float>(std::min<double>(limit, std::numeric_limits<float>::max()));
    const T nearest = Narrow<T>::of(clamped);
    auto bits = magnitude_bits(nearest);
    if (widen(nearest) > limit) --bits;
    return bits;
  }
}

template <class T>
struct BeyondRule : SearchRule<T, BeyondRule<T>> {
  decltype(largest_within<T>(0)) within;

  BeyondRule(const T* values, double limit) : SearchRule<T, BeyondRule<T>>{values}, within(largest_within<T>(limit)) {}
  SHARD_HD bool finds(T value) const {
    if constexpr (std::is_integral_v<T>) return !(fabs(static_cast<double>(value)) <= within);
    else return magnitude_bits(value) > within;
  }
};

}  // namespace shardproof::SHARD_KERNELS
