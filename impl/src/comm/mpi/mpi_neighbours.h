// Which ranks this one can read the memory of.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <map>
#include <memory>

#include "testing/comm/peer_memory.h"

namespace shardproof::mpi {

// The other ranks of this host, by rank of the world.
using Neighbours = std::map<int64_t, std::shared_ptr<process::PeerMemory>>;

// Shares the memory of this rank's host pool, and maps that of all other ranks. Collective over `host`, the communicator of the
// ranks on one host. When one of them does not want it, or cannot do it, the result is empty on all of them.
Neighbours find_neighbours(MPI_Comm host, bool wanted);

}  // namespace shardproof::mpi
