// The arithmetic of the fake device: the CPU's, on the calling thread's current stream.
#pragma once

#include <memory>

#include "shardproof/device/device_math.h"

namespace fake_device {

std::shared_ptr<const shardproof::DeviceMath> queued_math();

}  // namespace fake_device
