// Releasing and restoring the memory behind a tensor while views and autograd's saved tensors keep pointing at it.
#pragma once

#include <ATen/core/Tensor.h>

namespace shardproof {

// Gives the memory back. Every alias of the tensor's storage, saved ones included, is without data until it is restored;
// LibTorch refuses to read such a tensor ("data is not allocated yet").
void release_storage(const at::Tensor& tensor);

// New memory of the tensor's size, contents undefined. Version counters do not move: the values that will be written are the
// ones that were there.
void restore_storage(const at::Tensor& tensor);

bool storage_is_released(const at::Tensor& tensor);

}  // namespace shardproof
