#include "device/kernels/host_runner.h"
#include "device/kernels/kernel_math.h"
#include "shardproof/device/kernels/cuda.h"

namespace shardproof {

std::shared_ptr<const DeviceMath> kernel_twin() {
  return std::make_shared<const kernels::KernelMath<kernels::HostRunner>>(kernels::HostRunner());
}

}  // namespace shardproof
