// What fully_shard refuses: options that contradict each other, the mesh or the module.
#pragma once

#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include <memory>

#include "sharding/shard_plan.h"
#include "shardproof/comm/mesh_comm.h"
#include "shardproof/comm/require_same.h"
#include "shardproof/sharding/shard_options.h"

namespace shardproof {

class ParallelState;

void validate(const ShardOptions& options, const Mesh& mesh);
// The strategy that the options ask for, as it is on this mesh.
Strategy strategy_on(const ShardOptions& options, const Mesh& mesh);
// Whether a unit may see the ranks along the axes of a mesh of its own. `own` and `all` are what its strategy and that of the
// others are on their meshes.
void validate_view(const std::string& unit, int64_t rank, const Mesh& view, const Strategy& own, const Mesh& mesh,
                   const Strategy& all, const ParallelState* parallel);
void validate(const Reshard& reshard, const Strategy& strategy, const Mesh& mesh);

// Parameters that tensor parallelism was to cut would be taken for replicated ones.
void require_parallel(const Mesh& mesh, const ParallelState* parallel);
// A mesh of several ranks that share nothing: each would train a model of its own, as it does where the axis has another name
// than the strategy's.
void require_shared(const Mesh& mesh, const Strategy& strategy, const ParallelState* parallel);

// The mesh as strategies see it: ranks along cp that compute on their own positions sum gradients as those along dp_shard do.
// Throws Error when the module does not know of an axis that it must know of.
std::shared_ptr<MeshComm> data_parallel_comms(const torch::nn::Module& root, const ShardOptions& options,
                                              std::shared_ptr<MeshComm> comms);

// What has to be the same on all ranks, for require_same: every option that is no function, units with their options,
// parameters and buffers as each of them is, and where a plan failed, how.
Facts facts_of(const torch::nn::Module& root, const UnitPlans& plans, const ShardOptions& options, const Mesh& mesh,
               const std::string& failure);

// Where the parameters are, and those of the meta device will be: all in one place.
c10::Device device_of(const torch::nn::Module& root, const ShardOptions& options);

}  // namespace shardproof
