// Who trains the sharded side of a case: threads of this process, or the processes of a job.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "golden/golden.h"
#include "harness/case/case.h"
#include "harness/compare/pieces.h"
#include "harness/compare/step_exchange.h"
#include "shardproof/comm/comm.h"

namespace harness {

// What every element of every parameter is when a rank but 0 begins. Rank 0 begins with the run's parameters.
constexpr double beginning_of(int64_t rank) { return static_cast<double>(rank) + 0.5; }
// The same of all ranks of a run that begins in order to load a checkpoint.
constexpr double kResumedBeginning = beginning_of(1);

class Ranks {
 public:
  virtual ~Ranks() = default;
  // Where models are, the golden run's too.
  virtual c10::Device device() const { return c10::kCPU; }
  // The steps as [step][rank]. The library has to replace what ranks but 0 begin with.
  virtual std::vector<std::vector<RankStep>> train(const Case& c, const golden::Run& run) = 0;
  // How many of them hold each element.
  virtual Copies copies(const Case& c) const { return copies_of(c); }
  // Whether they train with the library, not with an engine (engine.h).
  virtual bool is_library() const { return true; }
};

// The order in which rank-threads run, and when collectives complete, follow from the case's seed.
Ranks& thread_ranks();

// Rank-threads that share a device which has arithmetic (device.h). Collectives complete as early as they may, and what a case
// asks for that only the CPU has, memory side by side, is gathered instead: neither changes a bit. `device` may be the CPU.
// `over`: makes of a rank-thread's communicator the one that the rank trains with.
using Over = std::function<std::shared_ptr<shardproof::Comm>(std::shared_ptr<shardproof::Comm>)>;
std::unique_ptr<Ranks> thread_ranks_on(c10::Device device, Over over = {});

// Registers ranks of your own, as rank-threads whose communicator or device you have written: `verify` and `replay` train with
// them for --backend NAME. Throws Error where the name is taken. Before `run_program`, from one thread.
void register_ranks(const std::string& name, std::function<std::unique_ptr<Ranks>()> make);
// Those; null where nobody has registered the name.
std::unique_ptr<Ranks> registered_ranks(const std::string& name);
// The names that --backend takes, registered ones last.
std::vector<std::string> names_of_backends();

}  // namespace harness
