#include "harness/data/sample_order.h"

#include "harness/case/random.h"
#include "shardproof/base/check.h"

namespace harness {
namespace {
constexpr uint64_t kRounds = 8;
}

SampleOrder::SampleOrder(int64_t samples, std::optional<uint64_t> seed) : samples_(samples), seed_(seed) {
  SHARD_REQUIRE(samples >= 1, "data", "an order has at least 1 sample, got {}", samples);
  while ((static_cast<uint64_t>(samples - 1) >> (2 * half_bits_)) != 0) ++half_bits_;
}

int64_t SampleOrder::sample(int64_t position) const {
  const auto place = static_cast<uint64_t>(position % samples_), epoch = static_cast<uint64_t>(position / samples_);
  if (!seed_) return static_cast<int64_t>(place);
  const uint64_t key = mix(mix(*seed_) + epoch), mask = (uint64_t{1} << half_bits_) - 1;
  uint64_t taken = place;
  do {
    uint64_t left = taken >> half_bits_, right = taken & mask;
    for (uint64_t round = 0; round < kRounds; ++round) {
      const uint64_t next = left ^ (mix(mix(key + round) ^ right) & mask);
      left = right;
      right = next;
    }
    taken = (left << half_bits_) | right;
  } while (taken >= static_cast<uint64_t>(samples_));
  return static_cast<int64_t>(taken);
}

}  // namespace harness
