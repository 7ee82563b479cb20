// What a training run is asked for, and what it reports of a step.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "golden/golden.h"
#include "harness/case/axes.h"
#include "harness/train/slow_ranks.h"
#include "harness/train/train_schedule.h"
#include "shardproof/algebra/mesh.h"

namespace harness {

// Where a run's checkpoints go; an empty directory: nowhere.
struct TrainCheckpoints {
  std::string directory;
  int64_t save_every = 0;  // steps, besides a save after the last one; 0: only that
  int64_t keep = 0;        // 0: all
  bool resume = false;     // go on from the last one that is there
  bool async = false;
  // The last one there when the run began, by rank 0's sight; -1: none. Not given: each process looks for itself.
  std::optional<int64_t> latest = {};
};

struct TrainOptions {
  // The folder of a Hugging Face model whose weights the run starts from; empty: from numbers drawn by `seed`. A run that goes
  // on from a checkpoint reads nothing of it.
  std::string weights;
  // A gpt or a llama: more vocab than any token, positions of at least the data's sequence length, no dropout. `canonical`:
  // sums inside of the model, too, do not depend on the mesh.
  golden::Model model;
  shardproof::Mesh mesh{{{axes::dp_shard, 2}}};  // of the axes dp_replicate, dp_shard, cp, tp
  bool sequence_parallel = false;            // along tp
  int64_t overlap_pieces = 1;                // of products that are cut over tp
  int64_t expert_ranks = 1;                  // that share the experts of a layer
  bool cut_experts = false;                  // inside, along tp
  int64_t context_attention = 0;             // a number of shardproof::ContextAttention
  std::string strategy = "zero3";
  golden::Optimizer optimizer;
  TrainSchedule schedule;  // of its learning rate
  double clip_norm = 1;  // 0: no clipping
  int64_t global_batch = 16;
  int64_t microbatch = 2;
  int64_t steps = 100;
  // Of sequences that are held out, if there are any: after so many steps and after the last one; 0: only then.
  int64_t validate_every = 0;
  int64_t validation_sequences_max = 0;  // 0: all
  uint64_t seed = 1;  // of the initial parameters; nothing else of the model is random
  bool check = false;        // against the golden run
  bool fingerprint = false;  // ranks compare fingerprints after each step, and signatures of collectives before each
  bool canonical = false;  // sums of gradients whose bits do not depend on the mesh
  // Units compute in bfloat16; main parameters, gradients, sums and optimizer state stay float32.
  bool bf16 = false;
  // What keeps no activations, and computes them again in the backward: `blocks`, `attention` within blocks, or the modules
  // whose names fit a pattern. Empty: nothing.
  std::string recompute;
  bool offload_activations = false;  // those of blocks lie in the host's memory between forward and backward
  std::vector<std::string> sharding;  // options of fully_shard (shardproof/sharding/named_options.h), "name=value"
  TrainCheckpoints checkpoints;
  std::function<double(int64_t rank)> clock = {};  // seconds, for what is said of slow ranks; empty: the machine's
  c10::Device device{c10::kCPU};  // of the model, the golden run's too; a GPU is shared by rank-threads
};

struct TrainStep {
  int64_t step = 0;
  double loss = 0;  // the mean over all tokens of the global batch
  std::optional<double> validation_loss = {};  // the mean over all held-out tokens, with the parameters after the step
  double learning_rate = 0;
  double gradient_norm = 0;    // before clipping
  double parameter_norm = 0;   // after the step
  int64_t zero_gradients = 0;  // elements
  int64_t held_bytes = 0;      // at most, for parameters, gradients, optimizer state and buffers, by the rank that holds most
  int64_t tokens = 0;
  double tokens_per_s = 0;
  std::vector<SlowRank> slow_ranks = {};  // that hold up the others
  bool stopped = false;  // the last step, because somebody asked to stop
  uint64_t data_checksum = 0;  // FNV-1a (64 bits) of the bytes of the step's sequences, rank by rank, round by round
};

}  // namespace harness
