// Builds the units, buckets and schedule of a sharded module.
#pragma once

#include <memory>
#include <vector>

#include "sharding/sharded_state.h"

namespace shardproof {

// See fully_shard. Collective.
std::shared_ptr<ShardedState> build_sharded(std::shared_ptr<torch::nn::Module> module, std::shared_ptr<MeshComm> comms,
                                             ShardOptions options, const std::vector<Sharding::Entry>& entries);

}  // namespace shardproof
