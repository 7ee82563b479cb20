// Trains a byte-level language model on text, sharded over the ranks of a mesh, threads or processes, and, when asked, the
// golden run beside it, compared after every step.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "golden/golden.h"
#include "harness/train/text_data.h"
#include "shardproof/algebra/mesh.h"
#include "shardproof/comm/process/process_world.h"

namespace harness {

// Where a run's checkpoints go; an empty directory: nowhere.
struct TrainCheckpoints {
  std::string directory;
  int64_t save_every = 0;  // steps, besides a save after the last one; 0: only that
  int64_t keep = 0;        // 0: all
  bool resume = false;     // go on from the last one that is there
  bool async = false;
};

struct TrainOptions {
  // A gpt or a llama: vocab of at least 256, positions of at least the data's sequence length, no dropout. `canonical`: sums
  // inside of the model, too, do not depend on the mesh.
  golden::Model model;
  shardproof::Mesh mesh{{{"dp_shard", 2}}};  // of the axes dp_replicate, dp_shard, cp, tp, in that order
  bool sequence_parallel = false;            // along tp
  std::string strategy = "zero3";
  golden::Optimizer optimizer;
  double clip_norm = 1;  // 0: no clipping
  int64_t global_batch = 16;
  int64_t microbatch = 2;
  int64_t steps = 100;
  uint64_t seed = 1;  // of the initial parameters; nothing else is random
  bool check = false;
  bool canonical = false;  // sums of gradients whose bits do not depend on the mesh
  bool offload = false;    // main parameters, optimizer state and final gradients lie in the host's memory
  TrainCheckpoints checkpoints;
  c10::Device device{c10::kCPU};  // of the model, the golden run's too; a GPU is shared by rank-threads
};

struct TrainStep {
  int64_t step = 0;
  double loss = 0;  // the mean over all tokens of the global batch
  double gradient_norm = 0;
  int64_t tokens = 0;
  double tokens_per_s = 0;
  uint64_t data_checksum =
      0;  // FNV-1a (64 bits) of the bytes of the step's sequences, rank by rank, round by round
};

struct TrainResult {
  int64_t first_step = 0;                 // where it began
  int64_t steps = 0;                      // reported
  int64_t values_compared = 0;            // 0 unless checked
  std::optional<std::string> difference = {};  // the first one, of the last step
};

// One microbatch: weight 1 / (tokens of the global batch), so that losses and gradients add up to those of
// the mean, however the batch is cut.
golden::Microbatch training_microbatch(const TextData& data, const BatchRule& rule, int64_t step,
                                       int64_t round, int64_t rank);

// The step at which the run goes on: that of the last checkpoint when it resumes and there is one, else 0. Throws Error when
// options of checkpoints do not fit each other, when there are checkpoints and the run does not resume, or the last one is of
// another run. A run is its model, data, batches, optimizer and seed; mesh, strategy, microbatch and the kind of gradient sums
// may change.
int64_t first_step(const TrainOptions& options, const TextData& data);

// Throws Error for options that do not fit each other, the data, or the checkpoints that are there.
void validate(const TrainOptions& options, const TextData& data);

// Calls `report` after every step, on the calling thread. With a check it stops at the first difference.
// Throws Error for options that do not fit each other, NonFiniteError when a loss or gradient is NaN or
// infinite.
//
// With `processes`, as many as the mesh has ranks, it is collective over them, and rank 0 reports and compares; the others
// return nothing but where the run began.
TrainResult train(const TrainOptions& options, const TextData& data, const std::function<void(const TrainStep&)>& report,
                  shardproof::ProcessWorld* processes = nullptr);

}  // namespace harness
