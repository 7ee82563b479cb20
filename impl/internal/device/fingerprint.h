// Sixty-four bits that tell the contents of buffers apart.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace shardproof {

// Of the bytes of a 1-D contiguous tensor. Equal bytes on devices of one type give equal fingerprints, in every process and
// with any number of threads. Bytes that differ, are exchanged or are shifted give other ones but for a chance of about 2^-64.
uint64_t fingerprint(const at::Tensor& values);
// Other bits of the same kind, by operators that every device has: `fingerprint` of memory that is not the CPU's.
uint64_t fingerprint_by_operators(const at::Tensor& values);
// Of two fingerprints in this order.
uint64_t combined(uint64_t first, uint64_t second);

}  // namespace shardproof
