// How a case is cut over the mesh axes "tp" and "cp".
#pragma once

#include <string>
#include <vector>

#include "harness/case.h"
#include "shardproof/context_parallel.h"
#include "shardproof/tensor_parallel.h"

namespace harness {

// The library's plan for a GPT; for an MLP styles drawn layer by layer from the seed: pairs of a column- and a row-parallel
// layer, layers alone that gather or cut for themselves, and layers that stay whole.
shardproof::ParallelPlan parallel_plan(const Case& c);

shardproof::ContextOptions context_options(const Case& c);

// Names of the parameters of which the ranks along tp hold different pieces; the others are whole on each.
std::vector<std::string> cut_parameters(const Case& c);

}  // namespace harness
