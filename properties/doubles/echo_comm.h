// A world of several ranks of which only one is there: the others hold what this one holds, and call what it calls. So one
// thread trains under any strategy on any mesh. On a device its calls are work of a stream of their own, as NCCL's are, and can
// be captured.
#pragma once

#include <memory>

#include "shardproof/comm/comm.h"

// `rank` of `size`.
std::shared_ptr<shardproof::Comm> echo_comm(int64_t rank, int64_t size);
