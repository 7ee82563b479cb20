// The 2-norm of a sharded gradient.
#pragma once

#include <array>
#include <cstdint>
#include <span>

namespace shardproof {

class ShardedState;

// Sum of squares of floats, exactly. Squares are added as integers, one pair of 64-bit counters an exponent, so the sum
// depends neither on the order nor on where shards are cut, and ranks combine by adding counters.
// Law: total() is the exact sum of all squares, rounded once to double, for up to 2^39 finite values.
class ExactSquares {
 public:
  static constexpr int64_t kCounters = 2 * 256;

  void add(std::span<const float> values);
  double total() const;

  // For the sum over ranks.
  std::array<int64_t, kCounters>& counters() { return counters_; }

 private:
  std::array<int64_t, kCounters> counters_{};  // [2 * exponent] low 24 bits of the squared significand, [.. + 1] the rest
};

// Collective over the axes that split the strategy's state. Throws NonFiniteError.
double gradient_norm(ShardedState& state);

}  // namespace shardproof
