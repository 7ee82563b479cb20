// Texts and bytes between ranks.
#pragma once

#include <string>
#include <vector>

#include "shardproof/comm/comm.h"

namespace harness {

// Rank 0's text, on every rank. Collective.
std::string share_text(shardproof::Comm& comm, const std::string& text);
// Every rank's bytes, on rank 0; empty elsewhere. Collective.
std::vector<std::string> collect_bytes(shardproof::Comm& comm, const std::string& mine);

}  // namespace harness
