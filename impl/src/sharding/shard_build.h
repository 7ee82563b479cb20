// Builds the units, buckets and schedule of a sharded module.
#pragma once

#include <memory>
#include <vector>

#include "sharding/sharded_impl.h"

namespace shardproof {

// See fully_shard. Collective.
std::shared_ptr<Sharded::Impl> build_sharded(std::shared_ptr<torch::nn::Module> module, std::shared_ptr<MeshComm> comms,
                                             ShardOptions options, const std::vector<Sharding::Entry>& entries);

}  // namespace shardproof
