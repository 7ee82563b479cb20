// Copies of values to the host, from wherever they lie.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

namespace shardproof::checkpoint {

// Queues on the current stream of a device; `finish_host_copies` waits for them. From the CPU the bytes are there at once.
// `from` is 1-D and contiguous.
void start_host_copy(char* to, const at::Tensor& from);
void finish_host_copies(c10::Device device);

// The other way: `to` gets the values of `from`, which lies in the host's memory, is contiguous, and has the same sizes and
// dtype. A device may read `from` until `finish_host_copies`.
void start_copy_from_host(const at::Tensor& to, const at::Tensor& from);

// Bytes of the host for copies of values on `from`. When that is a device, they are page-locked, so that copies run beside the
// host's work; where the host can lock no more, they are plain memory.
at::Tensor staging(size_t bytes, c10::Device from);

}  // namespace shardproof::checkpoint
