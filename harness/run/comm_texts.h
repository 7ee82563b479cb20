// Bytes of every rank.
#pragma once

#include <string>
#include <vector>

#include "shardproof/comm/comm.h"

namespace harness {

// Every rank's bytes, on rank 0; empty elsewhere. Collective.
std::vector<std::string> collect_bytes(shardproof::Comm& comm, const std::string& mine);

}  // namespace harness
