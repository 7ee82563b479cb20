// Who trains the sharded side of a case: threads of this process, or the processes of a job.
#pragma once

#include <vector>

#include "golden/golden.h"
#include "harness/case.h"
#include "harness/step_exchange.h"

namespace harness {

class Ranks {
 public:
  virtual ~Ranks() = default;
  // The steps as [step][rank]. Rank 0 begins with the run's parameters, the other ranks with different ones, which the library
  // has to replace.
  virtual std::vector<std::vector<RankStep>> train(const Case& c, const golden::Run& run) = 0;
};

// The order in which rank-threads run, and when collectives complete, follow from the case's seed.
Ranks& thread_ranks();

}  // namespace harness
