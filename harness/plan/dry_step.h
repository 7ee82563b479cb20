// One rank of a mesh of any size takes a step that reaches nobody: what it would hold, call and move.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "harness/plan/step_record.h"
#include "shardproof/comm/mesh_comm.h"
#include "shardproof/optim/optimizer.h"
#include "shardproof/sharding/fully_shard.h"
#include "shardproof/sharding/memory.h"
#include "shardproof/sharding/piece.h"

namespace harness {

// Calls of one kind in one group.
struct Traffic {
  std::string op, group;
  int64_t ranks = 0;             // of the group
  int64_t calls = 0, bytes = 0;  // of the whole buffer of each call
  int64_t worst_bytes = 0;       // the same where routing is as uneven for this rank as it can be (ExpertRows)
};

// The rows that a rank's experts get in a layer and microbatch, where ranks share experts.
struct ExpertRows {
  int64_t even = 0;   // the choices of all tokens are dealt out evenly, as a dry run takes them
  int64_t worst = 0;  // each token of each rank chooses as many of this rank's experts as it may
};

// What the run itself took, in seconds: the library's bookkeeping on a rank, since nothing is computed.
struct DryRunCost {
  double shard = 0;  // the model is built and sharded, and the optimizer is made
  double step = 0;   // the second step
  double placements = 0;
  double save_plan = 0;       // a save finds out who writes what; with DryRun::saves
  double next_save_plan = 0;  // the save after it, which finds the plan of the one before
};

struct DryRunResult {
  int64_t parameters = 0;         // elements of the whole model, ties once
  int64_t own_parameters = 0;     // elements that this rank keeps between steps
  shardproof::MemoryUse built;    // after the optimizer was made
  shardproof::MemoryUse stepped;  // after the second step, its peaks being of that step
  int64_t activation_bytes = 0;   // what a microbatch's forward leaves on the device for its backward
  int64_t peak_bytes = 0;         // all memory of the device at most in that step: `stepped`, activations, what operators make
  StepRecord record;              // of that step
  std::vector<Traffic> traffic;   // the sums of its collectives
  ExpertRows expert_rows;
  std::vector<shardproof::Piece> pieces;  // of the rank, without values
  std::map<std::string, shardproof::ParameterPlacement> placements;
  DryRunCost cost;
};

// What a rank trains.
struct DryTraining {
  std::shared_ptr<void> owner;  // of the others
  shardproof::Sharded& sharded;
  shardproof::Optimizer& optimizer;
  std::function<at::Tensor()> loss;  // the forward of a microbatch
  std::function<void()> stepped = {};  // what comes after the optimizer's step
};

struct DryStep {
  shardproof::Mesh mesh;
  int64_t rank = 0;
  int64_t rounds = 1;                                                        // microbatches
  bool saves = false;                                                        // plan a checkpoint, too
  std::function<void(double fraction, const std::string& what)> shown = {};  // hears how far a long run is
};

// The library's own step: what `make` builds and shards on the device without memory (meta_device.h) trains two steps, and the
// second one counts. The ranks of `make`'s communicators give zeros, so losses and gradients say nothing.
DryRunResult dry_step(const DryStep& step,
                      const std::function<DryTraining(const std::shared_ptr<shardproof::MeshComm>&)>& make);

}  // namespace harness
