// One contestant of the benchmark: trains and measures itself, in a process of its own.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "bench/model.h"
#include "shardproof/algebra/mesh.h"
#include "shardproof/comm/mesh_comm.h"
#include "shardproof/comm/process/process_world.h"
#include "shardproof/comm/timeline.h"
#include "shardproof/optim/optimizer.h"
#include "shardproof/parallel/tensor/tensor_parallel.h"
#include "shardproof/sharding/fully_shard.h"

namespace bench {

struct Task {
  // "ours", "side_by_side": ours without copies, "single", "fingerprint": ours with a FingerprintCheck after
  // each update and signatures of collectives
  std::string contestant;
  std::string strategy = "zero3";
  shardproof::Mesh mesh;  // of the axes dp_replicate, dp_shard and tp
  bool sequence_parallel = false;
  int64_t overlap_pieces = 1;
  int64_t expert_ranks = 1;  // so many neighbours share the experts of a block
  Size size;
  int64_t steps = 10, warmup = 2;
  double lr = 3e-4;
  c10::Device device{c10::kCPU};  // a GPU: of this process; its rank-threads share it. Meta: nothing has memory or values
  // Forwards and backwards in bfloat16, by autocast where there is one copy of the parameters, by a unit's own precision where
  // they are sharded; parameters, sums of gradients and updates in float32.
  bool bf16 = false;
  std::vector<std::string> sharding;   // of ours: options of fully_shard (named_options.h), "name=value"
  bool counts_tensors = false;         // of ours: their bytes, where they are allocated, which takes time
  std::string profile;                 // of ours: a file that gets the profile of rank 0's last step (bench/profile.h)

  // How many parts the batch of a step has. Ranks along tp have the same part.
  int64_t data_ranks() const { return mesh.size() / (mesh.has("tp") ? mesh.size("tp") : 1); }
};

// One rank of ours: a model, what cuts it, and its optimizer.
struct Training {
  Training(const Task& task, const std::shared_ptr<shardproof::MeshComm>& comms);
  // The forward. `tokens`: those of this rank.
  at::Tensor loss(const at::Tensor& tokens) const;

  Model model;
  std::optional<shardproof::TensorParallel> parallel;
  shardproof::Comm* cut = nullptr;  // the ranks among which the logits are cut, of a vocabulary of `vocab` entries
  int64_t vocab = 0;
  shardproof::Sharded sharded;
  shardproof::Optimizer optimizer;
};

// The part that a rank has of the batch of a step.
at::Tensor own_tokens(const Task& task, int64_t step, int64_t rank);

// {"step_ms": [...], "losses": [...] (warm-up included), "peak_mib": of one rank, above the process before the model, or on a
// GPU of what LibTorch allocated there, "calls", "bytes": of collectives in a step, "live_mib": largest bytes of parameters,
// gradients, optimizer and communication of one rank, "formula_mib", in float32 without experts: these and activation_bytes,
// "check_percent", of steps with a FingerprintCheck and signatures: their processor time, of that of the rest of the step}
// Of ours also "processor_ms": of steps of all ranks of the process, "tensor_mib": of the tensors of one rank at most,
// after the first step; 0 where they are not counted, and "shared_mib_of_others": the other processes' part of memory that they
// share with this one. The peak leaves it out.
//
// Ours with `processes` is collective over them, as many as ranks, and the result is rank 0's.
//
// Ours writes into `timeline`, where that is given: spans "step N", and in them "forward", "backward" and "optimizer", of the
// ranks that this process has.
nlohmann::json run(const Task& task, shardproof::ProcessWorld* processes = nullptr,
                   std::shared_ptr<shardproof::Timeline> timeline = nullptr);

// What PyTorch's contestants read: initial parameters, then tokens.
void write_data(const Task& task, const std::string& path);

}  // namespace bench
