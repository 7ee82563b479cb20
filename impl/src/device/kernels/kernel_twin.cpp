#include "cuda/host_runner.h"
#include "cuda/kernel_math.h"
#include "shardproof/cuda.h"

namespace shardproof {

std::shared_ptr<const DeviceMath> kernel_twin() {
  return std::make_shared<const kernels::KernelMath<kernels::HostRunner>>(kernels::HostRunner());
}

}  // namespace shardproof
