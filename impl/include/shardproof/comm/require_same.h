// Whether all ranks are of one job: started with the same program, command line and settings.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "shardproof/comm/comm.h"

namespace shardproof {

// Collective. Facts are names and values, e.g. {"mesh", "dp_shard=4"}; every rank has the same names. Throws Error on every
// rank when values differ, naming two ranks and both values.
void require_same(Comm& comm, const std::vector<std::pair<std::string, std::string>>& facts);
// What tells builds apart: a hash of the program and of this library.
std::string program_hash();

}  // namespace shardproof
