// The kernels' source on the CPU in packs, as a GPU's threads take it. The library's own arithmetic goes element by element.
#pragma once

#include <memory>

#include "shardproof/device/device_math.h"

namespace shardproof {

// On the CPU's memory. What a GPU runs but for its compiler's code and the order of packs.
std::shared_ptr<const DeviceMath> pack_math();

}  // namespace shardproof
