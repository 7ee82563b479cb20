// What a case says about sharding, in the library's words.
#pragma once

#include <memory>
#include <string>

#include "golden/golden.h"
#include "harness/case/case.h"
#include "harness/case/network.h"
#include "shardproof/shardproof.h"

namespace harness {

// Chooses modules by the hashes of their names, the same on every rank.
bool chosen(const Case& c, const char* what, const std::string& name);

// The network's module with the case's units, strategy and options; `run` has the values of parameters made without memory,
// which get theirs on `device`. Collective over the mesh.
shardproof::Sharded shard(const Case& c, const golden::Run& run, const Network& network,
                          std::shared_ptr<shardproof::MeshComm> comms, c10::Device device = at::kCPU);

// The case's groups in order, then one for all others; with muon each of them twice, for matrices and for the rest. The groups
// kUndecayedGroups are those that the library makes.
shardproof::Optimizer make_optimizer(shardproof::Sharded& sharded, const Case& c);

// Of the plan, times that of the schedule.
double lr_factor(const Case& c, size_t step);

// The order in which ranks run, and when collectives complete.
shardproof::ThreadsOptions threads_options(const Case& c);

}  // namespace harness
