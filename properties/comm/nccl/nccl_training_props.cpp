// Random training over the NCCL backend, on its double: rank-threads whose tensors pass through the double's device.
#include <ATen/Parallel.h>
#include <gtest/gtest.h>

#include "harness/case/generate.h"
#include "harness/run/run_case.h"
#include "properties/doubles/nccl_ranks.h"

namespace {

using namespace harness;

void expect_cases_hold(uint64_t seed, int64_t cases, const nccl_worlds::Arrangement& arrangement) {
  at::set_num_threads(1);  // the golden run's bits depend on it
  nccl_worlds::Ranks ranks(arrangement);
  int64_t several = 0;
  for (int64_t index = 0; index < cases; ++index) {
    const Case c = generate(seed, index, {.world_max = 4});
    several += c.mesh.size() > 1;
    const Verdict verdict = run_case(c, ranks);
    EXPECT_TRUE(verdict.held() || verdict.diverged()) << c.str() << "\n" << verdict.str();
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
