// Claims about runs that `verify` tests on its cases besides the comparison with the golden run. A program registers them
// before it calls run_program (harness/commands/program.h), as it does with strategies. docs/extending.md shows one.
//
//   register_property({.name = "the_norm_is_finite", .finished = [](const FinishedRun& run) -> Complaint {
//     for (const auto& ranks : run.sharded)
//       if (!std::isfinite(ranks[0].gradient_norm)) return fmt::format("a norm is {}", ranks[0].gradient_norm);
//     return {};
//   }});
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "golden/golden.h"
#include "harness/case/case.h"
#include "harness/compare/step_exchange.h"
#include "shardproof/comm/mesh_comm.h"
#include "shardproof/optim/optimizer.h"
#include "shardproof/sharding/fully_shard.h"

namespace harness {

// In one line, what is wrong; or nothing.
using Complaint = std::optional<std::string>;

// A case that was trained on both sides, and whose values agree.
struct FinishedRun {
  const Case& c;
  const golden::Run& run;                            // data, initial values
  const golden::Trace& golden;                       // [step]
  const std::vector<std::vector<RankStep>>& sharded;  // [step][rank]
};

// When a claim about a run that goes on is tested.
enum class Moment {
  begun,      // the module is sharded, and a checkpoint is loaded if the step loads one; before the first step of a run
  backward,   // gradients are final, and not clipped yet
  stepped     // the optimizer has updated, or the step was skipped
};
const char* to_string(Moment moment);

// One rank's run at a moment of a step.
struct LiveRun {
  const Case& c;  // with the mesh and the strategy of this step
  size_t step;
  Moment moment;
  shardproof::Sharded& sharded;
  shardproof::Optimizer& optimizer;
  shardproof::MeshComm& comms;
};

struct Property {
  std::string name;  // a word; failures begin with it
  // The cases for which the claim is made; empty: all. `live` is asked about the case as it is in that step.
  std::function<bool(const Case&)> applies = {};
  // At least one of these. `finished` is called once for a case, by whoever judges it, and must not change the run. `live` is
  // called on every rank at every moment, so it may communicate if it does so on all ranks. A complaint of one rank is enough.
  // The run goes on after a complaint, so that no rank waits for one that left. What a check throws ends the case as an error.
  std::function<Complaint(const FinishedRun&)> finished = {};
  std::function<Complaint(const LiveRun&)> live = {};
};

// Call it before cases run, in every process of a job. Throws Error when the name is no word or is taken, or when there is
// nothing to check.
void register_property(Property property);
const std::vector<Property>& properties();

// What live checks of this rank find at a moment.
void ask_properties(const LiveRun& run, std::vector<PropertyComplaint>& complaints);
// What was found about a run: the first live complaint in the order of steps and ranks, or that of the first registered check.
std::optional<PropertyComplaint> first_complaint(const FinishedRun& run);
// The names of those that are asked about a case.
std::vector<std::string> asked_about(const Case& c);

}  // namespace harness
