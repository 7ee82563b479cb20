#include "shardproof/algebra/box.h"

#include <fmt/ranges.h>

#include "shardproof/base/check.h"

namespace shardproof {
namespace {

constexpr int64_t kNumelMax = int64_t{1} << 62;  // leaves room to round up to a multiple of the ranks

}  // namespace

int64_t numel(const Box& box) {
  int64_t count = 1;
  for (const Interval& interval : box) count *= interval.size();
  return count;
}

int64_t numel(const Shape& shape) {
  int64_t count = 1;
  for (const int64_t size : shape) {
    SHARD_REQUIRE(size >= 0, "layout", "the sizes of shape [{}] must be at least 0, got {}",
                  fmt::join(shape, ","), size);
    SHARD_REQUIRE(!__builtin_mul_overflow(count, size, &count) && count <= kNumelMax, "layout",
                  "shape [{}] has more than 2^62 elements; use a smaller tensor", fmt::join(shape, ","));
  }
  return count;
}

}  // namespace shardproof
