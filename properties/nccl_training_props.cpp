// Random training over the NCCL backend, on its double: rank-threads whose tensors pass through the double's device.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "harness/case_checkpoints.h"
#include "harness/generate.h"
#include "harness/run_case.h"
#include "harness/sharded_run.h"
#include "nccl_worlds.h"

namespace {

using namespace harness;

class NcclRanks final : public Ranks {
 public:
  Steps train(const Case& c, const golden::Run& run) override {
    CaseCheckpoints checkpoints(c);
    return run_sharded(c, run, checkpoints, [](const Case& now, const RankBody& body) {
      nccl_worlds::run(now.mesh.size(), {.plan = {.seed = now.seed + 1, .host_tensors = true}}, body);
    });
  }
};

}  // namespace

TEST(NcclTraining, random_cases_over_nccl_equal_their_golden_runs) {
  at::set_num_threads(1);  // the golden run's bits depend on it
  NcclRanks ranks;
  int64_t several = 0;
  for (int64_t index = 0; index < 60; ++index) {
    const Case c = generate(4, index, {.world_max = 4});
    several += c.mesh.size() > 1;
    const Verdict verdict = run_case(c, ranks);
    EXPECT_TRUE(verdict.held || verdict.diverged) << c.str() << "\n" << verdict.what;
  }
  EXPECT_GT(several, 30);
}
