// Tensors that are equal to the last bit: -0.0 differs from 0.0, and a NaN equals itself.
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace kit {

// Whether dtype, sizes and every byte are the same. Two undefined tensors are the same.
inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined() || !b.defined()) return a.defined() == b.defined();
  const at::Tensor x = a.contiguous(), y = b.contiguous();
  return x.scalar_type() == y.scalar_type() && x.sizes() == y.sizes() &&
         (x.numel() == 0 || std::memcmp(x.const_data_ptr(), y.const_data_ptr(), x.nbytes()) == 0);
}

inline bool same_bits(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const at::Tensor& x, const at::Tensor& y) { return same_bits(x, y); });
}

}  // namespace kit
