#include "harness/data/batch_rule.h"

#include <algorithm>

#include "shardproof/base/check.h"

namespace harness {

BatchRule::BatchRule(int64_t global_batch, int64_t microbatch, int64_t ranks)
    : global_batch_(global_batch), microbatch_(microbatch), ranks_(ranks) {
  SHARD_REQUIRE(global_batch >= 1 && microbatch >= 1 && ranks >= 1, "data",
                "global batch, microbatch and ranks are at least 1, got {}, {} and {}", global_batch, microbatch, ranks);
  SHARD_REQUIRE(global_batch % (microbatch * ranks) == 0, "data",
                "the global batch of {} sequences must be a multiple of microbatch {} x {} data-parallel ranks = {}; change "
                "--global-batch or --microbatch",
                global_batch, microbatch, ranks, microbatch * ranks);
}

ValidationRule::ValidationRule(int64_t samples, int64_t microbatch, int64_t ranks)
    : samples_(samples), microbatch_(microbatch), ranks_(ranks) {
  SHARD_REQUIRE(samples >= 0 && microbatch >= 1 && ranks >= 1, "data",
                "microbatch and ranks are at least 1, and samples not below 0, got {}, {} and {}", microbatch, ranks, samples);
}

int64_t ValidationRule::rounds() const {
  const int64_t of_a_round = microbatch_ * ranks_;
  return (samples_ + of_a_round - 1) / of_a_round;
}

SampleRange ValidationRule::samples(int64_t round, int64_t rank) const {
  const int64_t begin = std::min(samples_, (round * ranks_ + rank) * microbatch_);
  return {begin, std::min(samples_, begin + microbatch_)};
}

SampleRange BatchRule::positions(int64_t step, int64_t round, int64_t rank) const {
  const int64_t begin = step * global_batch_ + (round * ranks_ + rank) * microbatch_;
  return {begin, begin + microbatch_};
}

}  // namespace harness
