// In the place of the CUDA parts where no compiler was found.
#include "shardproof/base/check.h"
#include "shardproof/device/kernels/cuda.h"

namespace shardproof {

bool cuda_built() {
  return false;
}

std::string why_no_cuda() {
  return "this build has no CUDA kernels: CMake found no nvcc, or SHARDPROOF_CUDA was off. ci/setup installs it; run cmake "
         "again and rebuild";
}

void use_cuda() {
  throw Error("[cuda] " + why_no_cuda());
}

std::shared_ptr<const DeviceMath> kernels_on(void*) {
  return nullptr;
}

}  // namespace shardproof
