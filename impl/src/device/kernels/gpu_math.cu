// clang-format off
#include "cuda/gpu_math.h"
#include "cuda/kernel_math.h"
#include "cuda/gpu_runner.cuh"
// clang-format on

namespace shardproof::kernels {

std::shared_ptr<const DeviceMath> make_gpu_math(std::function<void*()> stream) {
  return std::make_shared<const KernelMath<GpuRunner>>(GpuRunner(std::move(stream)));
}

}  // namespace shardproof::kernels
