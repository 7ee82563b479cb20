// The backend whose ranks are threads of one process. It is the default, and tests use it as a simulator. Every rank runs the
// same body with its own communicator. When the body throws on one rank it is ended on all, and `run_threads` throws the first
// real error, prefixed with the rank it came from. Ranks that wait for each other are found at once, without a time-out: the
// error lists the pending call of each rank.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "shardproof/comm/comm.h"
#include "shardproof/comm/threads/threads_options.h"

namespace shardproof {

// The largest number of rank-threads; `run_threads` throws Error for more.
constexpr int64_t kThreadsWorldMax = 1024;

// Runs body(comm) on `world` ranks and returns when it has ended on all of them. Later calls reuse the threads. It is an error
// when a rank returns without having waited for every collective that it started, or while other ranks wait for it.
void run_threads(int64_t world, const std::function<void(std::shared_ptr<Comm>)>& body, const ThreadsOptions& options = {});

}  // namespace shardproof
