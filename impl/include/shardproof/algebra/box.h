// Shapes of tensors and boxes of their indices: what layouts, and the arithmetic on them, are written in.
#pragma once

#include <cstdint>
#include <vector>

namespace shardproof {

using Shape = std::vector<int64_t>;

// Half-open, in global indices.
struct Interval {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  bool operator==(const Interval&) const = default;
};

// One interval per tensor dim. The box of a 0-dim tensor has no intervals and one element.
using Box = std::vector<Interval>;
int64_t numel(const Box& box);
// Throws Error when a size is negative or the product exceeds 2^62.
int64_t numel(const Shape& shape);

}  // namespace shardproof
