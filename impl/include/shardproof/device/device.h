// Which arithmetic works on whose memory. The CPU has it from the start; another device has none until `use_device_math` gives
// it some (cuda.h does for CUDA). Memory, copies, streams and events are LibTorch's.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "shardproof/base/dtypes.h"
#include "shardproof/device/device_math.h"

namespace shardproof {

// From now on, for tensors of this device. Not while collectives or steps run.
void use_device_math(c10::DeviceType device, std::shared_ptr<const DeviceMath> math);

// Throws Error on a device that was given none, naming what is missing.
const DeviceMath& device_math(c10::Device device);
inline const DeviceMath& device_math(const at::Tensor& tensor) {
  return device_math(tensor.device());
}
// Whether tensors of this device can be sharded.
bool has_device_math(c10::Device device);

}  // namespace shardproof
