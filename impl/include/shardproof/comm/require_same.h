// Checks that all ranks belong to one job, which means that they run the same program with the same command line and settings.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "shardproof/comm/comm.h"

namespace shardproof {

// A fact is a name and a value, e.g. {"mesh", "dp_shard=4"}. Every rank passes the same names in the same order. When some
// value differs, every rank throws an Error that names two ranks and both values. Collective.
void require_same(Comm& comm, const std::vector<std::pair<std::string, std::string>>& facts);
// A hash of the program's file and of this library's file. It tells builds apart.
std::string program_hash();

}  // namespace shardproof
