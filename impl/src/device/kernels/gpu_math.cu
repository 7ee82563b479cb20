// clang-format off
#include "device/kernels/gpu_math.h"
#include "device/kernels/gpu_runner.cuh"
#include "device/kernels/kernel_math.h"
// clang-format on

namespace shardproof::kernels {

std::shared_ptr<const DeviceMath> make_gpu_math(std::function<void*()> stream, int device) {
  return std::make_shared<const KernelMath<GpuRunner>>(GpuRunner(std::move(stream), device));
}

}  // namespace shardproof::kernels
