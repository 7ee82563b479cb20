// Releasing and restoring the memory behind a tensor while views and autograd's saved tensors keep pointing at it.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "sharding/memory_ledger.h"

namespace shardproof {

// Gives the memory back. Every alias of the tensor's storage, those that autograd saved included, is without data until it
// is restored.
void release_storage(const at::Tensor& tensor);

// New memory of the tensor's size, contents undefined; where the group has memory for what it gathers, of that. Version
// counters do not move: the values that will be written are the ones that were there.
void restore_storage(const at::Tensor& tensor, MemoryLedger& memory, MemoryKind kind, Comm* group = nullptr);

// A tensor over a whole storage that has no memory yet. Take views of it first, then release it, and restore it when it is
// wanted.
at::Tensor without_memory(int64_t numel, at::ScalarType dtype, c10::Device device);

// A tensor of these sizes without memory: reading or writing it throws c10::Error with the message.
at::Tensor unreadable(at::IntArrayRef sizes, at::ScalarType dtype, c10::Device device, const std::string& message);

bool storage_is_released(const at::Tensor& tensor);

// `parameter` has the sizes and the memory of `data` from now on, as after parameter.set_data(data).
void point_at(const at::Tensor& parameter, const at::Tensor& data);

}  // namespace shardproof
