// The norm of a sharded gradient.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "shardproof/sharding/fully_shard.h"

namespace shardproof {

// Sum of squares, or of magnitudes, of floats, exactly. Terms are added as integers, one pair of 64-bit counters an exponent,
// so the sum depends neither on the order nor on where shards are cut, and ranks combine by adding counters. Law: total is the
// exact sum of all terms, rounded once to double, for up to 2^39 finite values.
class ExactSum {
 public:
  enum class Term { square, magnitude };
  static constexpr int64_t kCounters = 2 * 256;

  explicit ExactSum(Term term) : term_(term) {}
  void add(std::span<const float> values);
  double total() const;

  // For the sum over ranks.
  std::array<int64_t, kCounters>& counters() { return counters_; }

 private:
  Term term_;
  std::array<int64_t, kCounters> counters_{};  // [2 * exponent] low 24 bits of the integer term, [.. + 1] the rest
};

// Of order 1, 2 or infinity, over parameters that require gradients. Collective over the axes that split the strategy's state
// and the tensor-parallel one.
// Throws NonFiniteError. `ordered` and `canonical` sums are exact for all dtypes but float64, which is added up in double in
// rank order.
double gradient_norm(ShardedState& state, double order);

}  // namespace shardproof
