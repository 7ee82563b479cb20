#include "checkpoint/host_copy.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "internal/base/stream_copy.h"
#include "internal/device/streams.h"

namespace shardproof::checkpoint {

void start_host_copy(char* to, const at::Tensor& from) {
  if (from.device().is_cpu()) return stream_copy(to, from.const_data_ptr(), from.nbytes());
  const at::NoGradGuard no_grad;
  at::from_blob(to, from.sizes(), from.options().device(at::kCPU).requires_grad(false)).copy_(from, /*non_blocking=*/true);
}

void start_copy_from_host(const at::Tensor& to, const at::Tensor& from) {
  const at::NoGradGuard no_grad;
  if (to.device().is_cpu() && to.is_contiguous())
    return stream_copy(to.mutable_data_ptr(), from.const_data_ptr(), from.nbytes());
  to.copy_(from, /*non_blocking=*/true);
}

void finish_host_copies(c10::Device device) {
  if (!device.is_cpu()) current_stream(device).synchronize();
}

at::Tensor staging(size_t bytes, c10::Device from) {
  const auto size = static_cast<int64_t>(bytes);
  try {
    if (!from.is_cpu()) return at::empty({size}, at::TensorOptions(at::kByte).pinned_memory(true));
  } catch (const c10::Error&) {
    // Plain memory, then.
  }
  return at::empty({size}, at::kByte);
}
}  // namespace shardproof::checkpoint
