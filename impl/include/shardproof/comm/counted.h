// A world of any size with one rank in it: collectives are checked, and come out as if every other rank gave zeros. For memory,
// calls and bytes of meshes far beyond this machine. (A maximum or minimum over ranks is the rank's own.)
#pragma once

#include <cstdint>
#include <memory>

#include "shardproof/comm/comm.h"

namespace shardproof {

// Use `traced` around it to read the counts. Throws Error when the rank is not in the world.
std::shared_ptr<Comm> counted(int64_t world, int64_t rank);

}  // namespace shardproof
