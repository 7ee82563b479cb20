// One rank of a mesh of any size takes a step that reaches nobody: what it would hold, call and move.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "harness/case/case.h"
#include "harness/plan/step_record.h"
#include "shardproof/sharding/memory.h"
#include "shardproof/sharding/piece.h"

namespace harness {

struct DryRun {
  Case what;  // model, mesh, strategy, offload and parallel options
  int64_t rank = 0;
  int64_t rounds = 1;             // microbatches of the step
  int64_t samples = 1;            // of a microbatch
  int64_t length = 0;             // of a sequence; 0: as long as the model takes
  std::string dtype = "float32";  // to compute and reduce gradients in; main parameters stay float32
  int64_t prefetch = 0;           // units that are gathered ahead
  bool recompute = false;         // blocks of a gpt or a llama keep no activations
  bool offload_activations = false;  // those of units lie in the host's memory between forward and backward
  int64_t delayed_gradient_bytes = 0;  // of what delayed gradients are made of, at most; 0: none is delayed
  bool saves = false;             // plan a checkpoint, too
  std::function<void(double fraction, const std::string& what)> shown = {};  // hears how far a long run is
};

// Calls of one kind in one group.
struct Traffic {
  std::string op, group;
  int64_t ranks = 0;             // of the group
  int64_t calls = 0, bytes = 0;  // of the whole buffer of each call
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
  std::vector<shardproof::Piece> pieces;  // of the rank, without values
  std::map<std::string, shardproof::ParameterPlacement> placements;
  DryRunCost cost;
};

// Along tp a gpt and a llama have the library's plan, an mlp the styles that its case draws. One rank runs the library's step
// on a device without memory (meta_device.h), so it takes neither this rank's memory nor its time. Where that cannot be (see
// below), it computes on the CPU, in memory for the whole rank; activation_bytes, peak_bytes and the operators of the record
// are then 0 and none. Throws Error when something does not fit, as the library does.
DryRunResult dry_run(const DryRun& options);

// Whether the run takes no memory: all do but those of a `conv` and those that offload the optimizer.
bool runs_without_memory(const DryRun& options);

}  // namespace harness
