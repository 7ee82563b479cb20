// Trains a case with the library under test.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>
#include <vector>

#include "golden/golden.h"
#include "harness/case/case.h"
#include "harness/compare/step_exchange.h"
#include "harness/run/case_checkpoints.h"
#include "harness/run/ranks.h"
#include "harness/run/tracing.h"
#include "shardproof/comm/comm.h"
#include "shardproof/comm/threads/schedule_policy.h"
#include "shardproof/sharding/fully_shard.h"

namespace harness {

using Steps = std::vector<std::vector<RankStep>>;  // [step][rank]
using RankBody = std::function<void(std::shared_ptr<shardproof::Comm>)>;
// Runs the body on each rank of a world as large as the case's mesh.
using RunWorld = std::function<void(const Case&, const RankBody&)>;
// Called by each rank when a step begins, and again when it has ended.
using StepWatch = std::function<void(int64_t rank, size_t step, bool ended, const shardproof::Sharded& sharded)>;

// Runs worlds of rank-threads, which take turns as the policy says, or by the case's seed where it is null. Each rank gets what
// `around` makes of its communicator, or the communicator itself where that is empty.
using AroundComm = std::function<std::shared_ptr<shardproof::Comm>(std::shared_ptr<shardproof::Comm>)>;
RunWorld on_threads(std::shared_ptr<shardproof::SchedulePolicy> policy, AroundComm around = {});

// By rank-threads: what the modules did in the microbatches of one step. The note of each call is the last collective that the
// rank had begun, e.g. "all_gather of unit 'h.0' in 'dp_shard'".
ModuleTraces trace_modules(const Case& c, const golden::Run& run, size_t step);
// The same of one microbatch of the golden run, by the same modules on one rank: with these parameters, unsharded.
MicrobatchTrace trace_unsharded(const golden::Model& model, const golden::Named& parameters, golden::Microbatch data);

// One training of a case.
struct Trial {
  Case c;
  const golden::Run& run;
  RunWorld run_world = on_threads(nullptr);
  c10::Device device = at::kCPU;  // of models, data and communication; what comes back is on the CPU
  double output_scale = 1;        // multiplies what the model gives, before the loss: an error to be found
  StepWatch watch = {};           // may be empty
  Tracing tracing = {};
};

// The steps of those ranks that `run_world` runs in this process; the others' are empty.
Steps run_sharded(const Trial& trial, CaseCheckpoints& checkpoints);
// With a folder of checkpoints for this call alone.
Steps run_sharded(const Trial& trial);

}  // namespace harness
