// Times collectives of one communicator, rank by rank the same calls.
#pragma once

#include <nlohmann/json.hpp>
#include <vector>

#include "shardproof/comm/comm.h"

namespace bench {

struct CollectivesTask {
  std::vector<int64_t> sizes_mib = {1, 16,
                                    64};  // of the whole buffer: what all_reduce sums, all_gather fills, reduce_scatter reads
  int64_t repeats = 10, warmup = 2;
};

// Collective. {"all_reduce": {"1": [milliseconds of the slowest rank, ...], ...}, "all_gather": ..., "reduce_scatter": ...}
nlohmann::json time_collectives(shardproof::Comm& comm, const CollectivesTask& task);
// GB/s that one thread copies at, of blocks of 64 MiB.
double copy_gb_per_s();

}  // namespace bench
