// The rows of a box: runs that are contiguous both in a file and in memory.
#pragma once

#include <algorithm>
#include <cstdint>

#include "shardproof/algebra/layout.h"

namespace shardproof::checkpoint {

struct RowWalk {
  Shape counts;        // of rows, along the dims outside them
  Shape from_strides;  // in elements, of those dims
  Shape to_strides;
  int64_t row_elements = 1;

  // A box of `sizes` whose elements lie `from` and `to` strides apart.
  RowWalk(const Shape& sizes, const Shape& from, const Shape& to) : counts(sizes), from_strides(from), to_strides(to) {
    while (!counts.empty() &&
           (counts.back() == 1 || (from_strides.back() == row_elements && to_strides.back() == row_elements))) {
      row_elements *= counts.back();
      counts.pop_back();
      from_strides.pop_back();
      to_strides.pop_back();
    }
  }

  // visit(element in the source, element in memory) for each row, in index order. No size may be 0.
  template <typename Visit>
  void each(const Visit& visit) const {
    Shape index(counts.size(), 0);
    int64_t from = 0, to = 0;
    while (true) {
      visit(from, to);
      size_t d = counts.size();
      while (d > 0) {
        --d;
        from += from_strides[d];
        to += to_strides[d];
        if (++index[d] < counts[d]) break;
        from -= from_strides[d] * counts[d];
        to -= to_strides[d] * counts[d];
        index[d] = 0;
        if (d == 0) return;
      }
      if (counts.empty()) return;
    }
  }
};

inline Shape sizes_of(const Box& box) {
  Shape sizes;
  for (const Interval& interval : box) sizes.push_back(interval.size());
  return sizes;
}

inline Box whole_box(const Shape& sizes) {
  Box box;
  for (const int64_t size : sizes) box.push_back({0, size});
  return box;
}

// As PyTorch has them, for tensors without elements too.
inline Shape contiguous_strides(const Shape& sizes) {
  Shape strides(sizes.size());
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0; stride *= std::max<int64_t>(sizes[d], 1)) strides[d] = stride;
  return strides;
}

}  // namespace shardproof::checkpoint
