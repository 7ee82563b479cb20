// The ranks that this one can read memory of: those on its host, where the system lets all of them do it.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <map>
#include <memory>

#include "testing/comm/peer_memory.h"

namespace shardproof::mpi {

// By rank of the world, without this one. Either all ranks of a host can read each other's memory, or none.
using Neighbours = std::map<int64_t, std::shared_ptr<process::PeerMemory>>;

// Collective over `host`, the communicator of the ranks on one host. Empty on all of them unless all want it.
Neighbours find_neighbours(MPI_Comm host, bool wanted);

}  // namespace shardproof::mpi
