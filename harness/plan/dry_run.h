// One rank of a mesh of any size takes a step that reaches nobody: what it would hold, call and move.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "harness/case/case.h"
#include "shardproof/sharding/memory.h"
#include "shardproof/sharding/piece.h"

namespace harness {

struct DryRun {
  Case what;  // model, mesh, strategy, offload and parallel options
  int64_t rank = 0;
  int64_t rounds = 1;   // microbatches of the step
  int64_t samples = 1;  // of a microbatch
  int64_t length = 0;   // of a sequence; 0: as long as the model takes
  std::string dtype = "float32";  // to compute and reduce gradients in; main parameters stay float32
};

// Calls of one kind in one group.
struct Traffic {
  std::string op, group;
  int64_t ranks = 0;  // of the group
  int64_t calls = 0, bytes = 0;  // of the whole buffer of each call
};

struct DryRunResult {
  int64_t parameters = 0;      // elements of the whole model, ties once
  int64_t own_parameters = 0;  // elements that this rank keeps between steps
  shardproof::MemoryUse built;   // after the optimizer was made
  shardproof::MemoryUse stepped;  // after the second step, its peaks being of that step
  std::vector<Traffic> traffic;  // of that step
  std::vector<shardproof::Piece> pieces;  // of the rank, without values
};

// Along tp a gpt and a llama have the library's plan, an mlp the styles that its case draws. The model is built without memory,
// and one rank really computes, on zeros: so it needs this rank's memory, and time. Throws Error when something does not fit,
// as the library does.
DryRunResult dry_run(const DryRun& options);

}  // namespace harness
