// The arithmetic of the fake device: the CPU's, on the calling thread's current stream of the device; -1 is the current one.
#pragma once

#include <c10/core/Device.h>

#include <memory>

#include "shardproof/device/device_math.h"

namespace fake_device {

std::shared_ptr<const shardproof::DeviceMath> queued_math(c10::DeviceIndex device);

}  // namespace fake_device
