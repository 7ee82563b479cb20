// What tensors have, in 64 bits.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace shardproof {

// Of the bits in row-major order: an element counts by what it is and where.
uint64_t digest_of(const at::Tensor& tensor);

}  // namespace shardproof
