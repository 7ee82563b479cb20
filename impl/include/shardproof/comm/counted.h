// A world of any size of which one rank runs. Its collectives check their arguments and give what they would give if every
// other rank contributed zeros; a maximum or minimum over ranks is the rank's own value. It measures memory, calls and bytes of
// a rank on meshes that are too large for this machine.
#pragma once

#include <cstdint>
#include <memory>

#include "shardproof/comm/comm.h"

namespace shardproof {

// Wrap the result in `traced` (traced.h) to read the counts. Throws Error unless 0 <= rank < world.
std::shared_ptr<Comm> counted(int64_t world, int64_t rank);

}  // namespace shardproof
