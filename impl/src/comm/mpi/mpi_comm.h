// The library's communicator over a group of an engine.
#pragma once

#include <memory>

#include "comm/mpi/mpi_engine.h"
#include "shardproof/comm/comm.h"

namespace shardproof::mpi {

std::shared_ptr<Comm> make_comm(std::shared_ptr<Engine> engine, std::shared_ptr<Group> group);

}  // namespace shardproof::mpi
