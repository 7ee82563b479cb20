// Random training over the NCCL backend, on its double: rank-threads whose tensors pass through the double's device.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "harness/case/generate.h"
#include "harness/run/case_checkpoints.h"
#include "harness/run/run_case.h"
#include "harness/run/sharded_run.h"
#include "properties/doubles/nccl_worlds.h"

namespace {

using namespace harness;

class NcclRanks final : public Ranks {
 public:
  // The seed becomes the case's.
  explicit NcclRanks(nccl_worlds::Arrangement arrangement) : arrangement_(std::move(arrangement)) {}

  Steps train(const Case& c, const golden::Run& run) override {
    CaseCheckpoints checkpoints(c);
    return run_sharded(c, run, checkpoints, [this](const Case& now, const RankBody& body) {
      arrangement_.plan.seed = now.seed + 1;
      nccl_worlds::run(now.mesh.size(), arrangement_, [&body](const auto& comm) {
        at::set_num_threads(1);  // of this rank's thread: products add in another order with more
        body(comm);
      });
    });
  }

 private:
  nccl_worlds::Arrangement arrangement_;
};

void expect_cases_hold(uint64_t seed, int64_t cases, const nccl_worlds::Arrangement& arrangement) {
  at::set_num_threads(1);  // the golden run's bits depend on it
  NcclRanks ranks(arrangement);
  int64_t several = 0;
  for (int64_t index = 0; index < cases; ++index) {
    Case c = generate(seed, index, {.world_max = 4});
    c.options.side_by_side = 0;  // ranks with a GPU each have no memory in common
    several += c.mesh.size() > 1;
    const Verdict verdict = run_case(c, ranks);
    EXPECT_TRUE(verdict.held || verdict.diverged) << c.str() << "\n" << verdict.what;
  }
  EXPECT_GT(several, cases / 2);
}

}  // namespace

TEST(NcclTraining, random_cases_over_nccl_equal_their_golden_runs) {
  expect_cases_hold(4, 60, {.plan = {.host_tensors = true}});
}

// Tensors are on the double's device, and buckets in windows, of which ranks must use the same ones in the same calls.
TEST(NcclTraining, random_cases_with_registered_buckets_equal_their_golden_runs) {
  nccl_worlds::Arrangement arrangement{.presses = true, .late_inputs = false};
  arrangement.options.buffers = shardproof::NcclApi::Memory::symmetric;
  expect_cases_hold(9, 60, arrangement);
}
