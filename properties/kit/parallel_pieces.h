// Tensors for properties of parallel layers, and their pieces along the ranks of a group.
#pragma once

#include <ATen/ATen.h>

#include <vector>

#include "shardproof/algebra/layout.h"

namespace pieces {

// Small integers: products and sums of them are exact, in any order.
inline at::Tensor integers(std::vector<int64_t> sizes, int64_t salt) {
  const int64_t count = c10::multiply_integers(sizes);
  return (at::arange(count, at::kLong) * 7 + salt * 13).remainder(9).sub(4).to(at::kFloat).view(sizes);
}

inline at::Tensor piece_of(const at::Tensor& whole, int64_t dim, int64_t parts, int64_t part) {
  const shardproof::Interval own = shardproof::piece({}, whole.size(dim), parts, part);
  return whole.narrow(dim, own.begin, own.size());
}

}  // namespace pieces
