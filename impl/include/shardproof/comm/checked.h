// A decorator over any backend that compares every collective's signature across ranks before it runs: a mismatch becomes an
// Error on every rank that names two ranks and both calls, where a backend might hang or corrupt memory.
#pragma once

#include <memory>

#include "shardproof/comm/comm.h"

namespace shardproof {

// Each collective costs one small all_gather more. Sends and receives pass unchecked: they match by tag. Groups split from
// it are checked as well.
std::shared_ptr<Comm> checked(std::shared_ptr<Comm> inner);

}  // namespace shardproof
