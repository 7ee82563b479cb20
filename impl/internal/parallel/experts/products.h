// Products of rows with the matrices of their experts.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace shardproof {

// Whether one kernel of a GPU can take the products of several experts: those of bfloat16 whose rows begin at multiples of 16
// bytes.
bool suit_groups(const at::Tensor& x, const at::Tensor& weight);

// x [rows, in] times the transposed matrices of weight [experts, out, in] -> [rows, out]. Blocks of so many rows are those of
// the first source's experts, then those of the second's, and so on. `grouped`: one call for all blocks of a source, for which
// they have to suit; else one for each block. A weight's gradient adds sources in their order either way. Differentiable once.
at::Tensor expert_products(const at::Tensor& x, const at::Tensor& weight, const std::vector<int64_t>& blocks, bool grouped);

}  // namespace shardproof
