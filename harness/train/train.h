// Trains a language model on text or tokens, sharded over the ranks of a mesh, threads or processes, and, when asked, the
// golden run beside it, compared after every step.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "harness/compare/difference.h"
#include "harness/data/training_data.h"
#include "harness/train/train_options.h"
#include "shardproof/comm/process/process_world.h"

namespace harness {

struct TrainResult {
  int64_t first_step = 0;                 // where it began
  int64_t steps = 0;                      // reported
  bool stopped = false;                   // before the last step, because somebody asked to stop
  int64_t values_compared = 0;            // 0 unless checked
  FoundDifference difference = {};        // the first one, of the last step
};

// Throws Error for options that do not fit each other, the data, or the checkpoints that are there.
void validate(const TrainOptions& options, const TrainingData& data);

// Calls `report` after every step, on the calling thread. With a check it stops at the first difference.
// Throws Error for options that do not fit each other, NonFiniteError when a loss or gradient is NaN or
// infinite.
//
// With `processes`, as many as the mesh has ranks, it is collective over them, and rank 0 reports and compares; the others
// return nothing but where the run began.
TrainResult train(const TrainOptions& options, const TrainingData& data, const std::function<void(const TrainStep&)>& report,
                  shardproof::ProcessWorld* processes = nullptr);

}  // namespace harness
