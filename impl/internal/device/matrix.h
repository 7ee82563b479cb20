// Leading dims as one.
#pragma once

#include <ATen/core/Tensor.h>

namespace shardproof {

// x [.., n] as a matrix [rows, n]; n may be 0. It is a view where strides allow that, and a matrix is itself.
inline at::Tensor rows_of(const at::Tensor& x) {
  return x.dim() == 2 ? x : x.reshape({c10::multiply_integers(x.sizes().slice(0, x.dim() - 1)), x.size(-1)});
}

// dy W, the gradient of the rows x [n, in] of a product with a weight W [out, in], as autograd's own formula has it.
inline at::Tensor gradient_of_rows(const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight) {
  const bool by_columns = x.stride(0) == 1 && x.stride(1) == x.size(0);
  return by_columns ? weight.t().mm(dy.t()).t() : dy.mm(weight);
}

}  // namespace shardproof
