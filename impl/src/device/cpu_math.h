// The CPU's arithmetic, for the list of devices. kernels/ makes it, as it does a GPU's.
#pragma once

#include <memory>

#include "shardproof/device/device_math.h"

namespace shardproof {

std::shared_ptr<const DeviceMath> cpu_math();

}  // namespace shardproof
