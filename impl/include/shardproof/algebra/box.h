// The shape of a tensor and boxes of its indices. Layouts, and the arithmetic on them, are written in these.
#pragma once

#include <cstdint>
#include <vector>

namespace shardproof {

using Shape = std::vector<int64_t>;

// The half-open interval [begin, end) of global indices.
struct Interval {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  bool operator==(const Interval&) const = default;
};

// Where the run of a tensor begins in a bucket, and how long the bucket is. Length 0: there is no bucket.
struct BucketPlace {
  int64_t offset = 0;
  int64_t length = 0;
  bool operator==(const BucketPlace&) const = default;
};

// A box has one interval for each dim of the tensor. The box of a 0-dim tensor has no intervals and one element.
using Box = std::vector<Interval>;
int64_t numel(const Box& box);
// The number of elements. Throws Error when a size is negative or the product exceeds 2^62.
int64_t numel(const Shape& shape);

}  // namespace shardproof
