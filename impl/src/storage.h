// Releasing and restoring the memory behind a tensor while views and autograd's saved tensors keep pointing at it.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace shardproof {

// Gives the memory back. Every alias of the tensor's storage, those that autograd saved included, is without data until it
// is restored.
void release_storage(const at::Tensor& tensor);

// New memory of the tensor's size, contents undefined. Version counters do not move: the values that will be written are the
// ones that were there.
void restore_storage(const at::Tensor& tensor);

// A tensor of these sizes without memory: reading or writing it throws c10::Error with the message.
at::Tensor unreadable(at::IntArrayRef sizes, at::ScalarType dtype, const std::string& message);

bool storage_is_released(const at::Tensor& tensor);

}  // namespace shardproof
