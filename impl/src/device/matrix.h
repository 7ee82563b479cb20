// Leading dims as one.
#pragma once

#include <ATen/core/Tensor.h>

namespace shardproof {

// x [.., n] as a matrix [rows, n]; n may be 0. It is a view where strides allow that, and a matrix is itself.
inline at::Tensor rows_of(const at::Tensor& x) {
  return x.dim() == 2 ? x : x.reshape({c10::multiply_integers(x.sizes().slice(0, x.dim() - 1)), x.size(-1)});
}

}  // namespace shardproof
