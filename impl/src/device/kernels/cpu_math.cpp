#include "device/cpu_math.h"

#include "device/kernels/cpu_runner.h"
#include "device/kernels/kernel_math.h"

namespace shardproof {

std::shared_ptr<const DeviceMath> cpu_math() {
  return std::make_shared<const kernels::KernelMath<kernels::CpuRunner>>(kernels::CpuRunner());
}

}  // namespace shardproof
