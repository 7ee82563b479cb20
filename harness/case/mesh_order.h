// In which order the axes of a case's mesh stand. The last axis varies fastest over the ranks, so the order says which ranks
// are neighbours.
#pragma once

#include <string>
#include <vector>

#include "shardproof/algebra/mesh.h"
#include "shardproof/algebra/strategy.h"

namespace harness {

// The axes that a case's mesh may have: dp_replicate, dp_shard, cp, tp, in the usual order.
const std::vector<std::string>& mesh_axes();

// Whether the axes of more than one rank stand in the usual order.
bool is_in_usual_order(const shardproof::Mesh& mesh);
shardproof::Mesh in_usual_order(const shardproof::Mesh& mesh);

// The same axes in every order that is not the usual one and that data_parallel_mesh takes. Empty where there is none.
std::vector<shardproof::Mesh> in_other_orders(const shardproof::Mesh& mesh);

// Whether a strategy adds the gradients of replicas before those of shards: where it adds both at once, and dp_replicate comes
// after dp_shard. Here and below, the strategy is what shardproof::on_mesh returns for the mesh.
bool sums_replicas_first(const shardproof::Strategy& strategy, const shardproof::Mesh& mesh);

// Whether the sums of a strategy end at the layouts that it names. They go along the innermost axis of the mesh first, and each
// may split its result once more; so a layout that several of them split has to name the innermost axis first.
bool can_sum_on(const shardproof::Strategy& strategy, const shardproof::Mesh& mesh);

}  // namespace harness
