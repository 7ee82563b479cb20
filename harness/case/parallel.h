// How a case is cut over the mesh axes "tp" and "cp".
#pragma once

#include <map>
#include <string>

#include "harness/case/case.h"
#include "shardproof/parallel/context/context_parallel.h"
#include "shardproof/parallel/tensor/tensor_parallel.h"

namespace harness {

// The library's plan for a language model; for an MLP styles drawn layer by layer from the seed: pairs of a column- and a
// row-parallel layer, layers alone that gather or cut for themselves, and layers that stay whole.
shardproof::ParallelPlan parallel_plan(const Case& c);

// Throws Error when not as many ranks as `ep` says can share experts, or there is nothing that `etp` could cut. `command`: the
// one whose options --expert-ranks and --cut-experts these are.
void require_expert_ranks(const Case& c, const char* command);

shardproof::ContextOptions context_options(const Case& c);

// The parameters of which the ranks along tp hold different pieces, and how many of these ranks hold the same one (key heads
// that are fewer than the ranks); the others are whole on each.
std::map<std::string, int64_t> cut_parameters(const Case& c);

}  // namespace harness
