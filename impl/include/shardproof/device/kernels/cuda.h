// The arithmetic of device_math.h as CUDA kernels. docs/cuda.md says what runs where.
#pragma once

#include <memory>
#include <string>

#include "shardproof/device/device_math.h"

namespace shardproof {

// Whether the library was built with CUDA kernels.
bool cuda_built();
// Says why CUDA cannot be used here, e.g. that there is no driver or no GPU; empty when it can. It never throws.
std::string why_no_cuda();

// Loads LibTorch's CUDA libraries and sets the arithmetic for tensors on CUDA devices. Later calls do nothing. Call it before
// the program makes its first tensor on a GPU. Throws Error, which gives the reason, where CUDA cannot be used.
void use_cuda();

// The kernels on `stream`, a cudaStream_t of the calling thread's device, instead of on LibTorch's current stream. It does not
// need LibTorch's CUDA libraries. Returns null when the library was built without kernels.
std::shared_ptr<const DeviceMath> kernels_on(void* stream);

}  // namespace shardproof
