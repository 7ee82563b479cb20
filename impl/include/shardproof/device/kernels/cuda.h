// CUDA: kernels for the arithmetic of device_math.h. docs/cuda.md says what runs where.
#pragma once

#include <memory>
#include <string>

#include "shardproof/device/device_math.h"

namespace shardproof {

// Whether this build has kernels.
bool cuda_built();
// Why CUDA cannot be used here, e.g. that there is no driver or no GPU; empty when it can. Never throws.
std::string why_no_cuda();

// Loads LibTorch's CUDA parts and gives tensors on CUDA devices their arithmetic; nothing when that was done. Throws Error with
// the reason where it is impossible. Call it before the first tensor on a GPU.
void use_cuda();

// The kernels on `stream`, a cudaStream_t of the calling thread's device, whatever LibTorch's current one is; LibTorch's CUDA
// parts are not needed. Null in a build without kernels.
std::shared_ptr<const DeviceMath> kernels_on(void* stream);

}  // namespace shardproof
