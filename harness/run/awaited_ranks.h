// An experiment on a case that fails: whether it still fails when no collective is under way beside something else.
#pragma once

#include <memory>

#include "harness/run/ranks.h"
#include "shardproof/comm/comm.h"

namespace harness {

// The same communicator, but every collective is over when the call returns. Messages between two ranks are not: their sender
// would wait for a receive that its receiver may call later.
std::shared_ptr<shardproof::Comm> awaited(std::shared_ptr<shardproof::Comm> comm);

// thread_ranks() on such communicators.
Ranks& awaited_ranks();

}  // namespace harness
