// Sums of floats without any rounding but the last, which is how a norm has the same bits on every mesh.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

#include "shardproof/device/device_math.h"

namespace shardproof {

// Sum of squares, or of magnitudes, of floats, exactly. Terms are added as integers, one pair of 64-bit counters an exponent,
// so the sum depends neither on the order nor on where shards are cut, and ranks combine by adding counters. Such sums are
// called long accumulators (Kulisch and Miranker 1981). Law: total is the exact sum of all terms, rounded once to double,
// for up to 2^39 finite values.
class ExactSum {
 public:
  enum class Term { square, magnitude };
  static constexpr int64_t kCounters = 2 * 256;

  // Counters of zero, on the device.
  ExactSum(Term term, c10::Device device);
  // What ranks have added up, and somebody has copied.
  ExactSum(Term term, at::Tensor counters) : term_(term), counters_(std::move(counters)) {}

  // The spans lie in the memory of the device. Nobody waits for it.
  void add(std::span<const FlatSpan> spans);
  // Waits for the device where the counters lie there.
  double total() const;
  // For the sum over ranks.
  const at::Tensor& counters() const { return counters_; }

 private:
  Term term_;
  at::Tensor counters_;  // [2 * exponent] low 24 bits of the integer term, [.. + 1] the rest
};

}  // namespace shardproof
