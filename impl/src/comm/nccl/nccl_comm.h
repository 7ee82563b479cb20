// The library's communicator over a group of an engine.
#pragma once

#include <memory>
#include <string>

#include "comm/nccl/nccl_engine.h"
#include "shardproof/comm/comm.h"

namespace shardproof::nccl {

std::shared_ptr<Comm> make_comm(std::shared_ptr<Engine> engine, std::shared_ptr<Group> group, std::string name);

}  // namespace shardproof::nccl
