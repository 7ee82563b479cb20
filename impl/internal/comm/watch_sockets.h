// The connections of ProcessWatch, between rank 0 and every other rank.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace shardproof {

using WatchDeadline = std::chrono::steady_clock::time_point;

// A listening socket, and where it can be reached: on every network of this host, "10.0.0.1:4711 ...", or on loopback alone
// when all ranks are on it.
std::pair<int, std::string> watch_listen(int64_t world, bool one_host);
// Waits for so many connections that say which rank they are; the first argument is consumed by nobody.
std::vector<std::pair<int64_t, int>> watch_accept(int listener, int64_t connections, WatchDeadline deadline);
// To the first address that answers as this job's.
int watch_connect(const std::string& addresses, int64_t rank, WatchDeadline deadline);

}  // namespace shardproof
