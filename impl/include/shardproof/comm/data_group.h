// Ranks along tp must work on the same batch, and so must ranks along cp before each cuts out its own positions. When their
// batches differ nothing fails by itself, and the model learns from a mixture of batches. These functions find that, or prevent
// it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "shardproof/comm/comm.h"

namespace shardproof {

// A hash of the values' bits in row-major order: an element counts by what it is and where. Values on a device are copied.
uint64_t digest_of(const at::Tensor& tensor);

// Throws Error on every rank when some rank's tensor differs from rank 0's in shape, dtype or any bit; the message names those
// ranks. Each rank computes a digest of its tensor, and the digests are gathered. Collective.
void check_same_data(const at::Tensor& tensor, Comm& group);

// Returns the tensor of rank `root` on every rank. The other ranks' argument is ignored and may be undefined. Collective.
at::Tensor broadcast_data(const at::Tensor& tensor, Comm& group, int64_t root = 0);

}  // namespace shardproof
