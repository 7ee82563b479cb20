// Ranks as threads of one process: the embedded default backend, and the simulator. Every rank runs the same body with its
// own communicator. A body that throws ends every rank; what `run_threads` rethrows is the first real error, prefixed with
// its rank. Ranks that wait for each other are a deadlock error at once (no time-out), listing each rank's pending call.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "shardproof/comm/comm.h"
#include "shardproof/comm/threads/threads_options.h"

namespace shardproof {

// More rank-threads than this are refused with an Error.
constexpr int64_t kThreadsWorldMax = 1024;

// Runs body(comm) on `world` ranks and returns when all have ended. Threads are kept and reused by later calls. Also an
// error: a rank that returns while collectives it started were never waited for, or while others wait for it.
void run_threads(int64_t world, const std::function<void(std::shared_ptr<Comm>)>& body, const ThreadsOptions& options = {});

}  // namespace shardproof
