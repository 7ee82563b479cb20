// A world of any size with one rank in it: collectives are checked, counted and do nothing. For memory, calls and bytes of
// meshes far beyond this machine; results of gathers and sums are undefined.
#pragma once

#include <cstdint>
#include <memory>

#include "shardproof/comm.h"

namespace shardproof {

// Use `traced` around it to read the counts. Throws Error when the rank is not in the world.
std::shared_ptr<Comm> counted(int64_t world, int64_t rank);

}  // namespace shardproof
