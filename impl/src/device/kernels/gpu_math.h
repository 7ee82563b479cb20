// The kernels. Free of Torch: what compiles them sees neither its headers nor the library's.
#pragma once

#include <functional>
#include <memory>

#include "shardproof/device/device_math.h"

namespace shardproof::kernels {

// `stream` returns the cudaStream_t that the calling thread's work goes to; it is asked at every call. It is one of the device
// of this number, which is current during a call; or for -1 of the current one.
std::shared_ptr<const DeviceMath> make_gpu_math(std::function<void*()> stream, int device = -1);

}  // namespace shardproof::kernels
