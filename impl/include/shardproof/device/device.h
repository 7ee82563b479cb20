// Which arithmetic works on whose memory. On the CPU the library has loops of its own; a device has none until
// `use_device_math` gives it some (cuda.h does for CUDA). Memory, copies, streams and events are LibTorch's.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>

#include "shardproof/device/device_math.h"

namespace shardproof {

// From now on, for tensors of this device; null takes it away. On kCPU it takes the place of the library's loops, which is how
// kernels are tested where there is no GPU. Not while collectives or steps run.
void use_device_math(c10::DeviceType device, std::shared_ptr<const DeviceMath> math);

// Null on a CPU that uses the library's loops. Throws Error on another device that was given none, naming what is missing.
const DeviceMath* device_math(c10::Device device);
inline const DeviceMath* device_math(const at::Tensor& tensor) {
  return device_math(tensor.device());
}
// Whether tensors of this device can be sharded.
bool has_device_math(c10::Device device);

// Throws Error for a dtype that no kernel knows.
Element element_type(at::ScalarType dtype);

}  // namespace shardproof
