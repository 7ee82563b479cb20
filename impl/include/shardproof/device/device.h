// Which implementation of DeviceMath works on the tensors of which device. The CPU has one from the start. Another device has
// none until `use_device_math` sets it, which use_cuda() (kernels/cuda.h) does for CUDA. Memory, copies, streams and events are
// LibTorch's.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "shardproof/base/dtypes.h"
#include "shardproof/device/device_math.h"

namespace shardproof {

// Sets the arithmetic for tensors of this device from now on; without an index, of all devices of its type that have none of
// their own. Who calls it may have another device current. It must not be set while collectives or training steps run.
void use_device_math(c10::Device device, std::shared_ptr<const DeviceMath> math);

// The arithmetic of this device. Throws Error, which says what is missing, when the device has none.
const DeviceMath& device_math(c10::Device device);
inline const DeviceMath& device_math(const at::Tensor& tensor) {
  return device_math(tensor.device());
}
// Whether the device has arithmetic, so that its tensors can be sharded.
bool has_device_math(c10::Device device);

}  // namespace shardproof
