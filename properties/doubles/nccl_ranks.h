// Rank-threads that train over the NCCL backend on its double.
#pragma once

#include <ATen/Parallel.h>

#include <memory>

#include "harness/run/case_checkpoints.h"
#include "harness/run/ranks.h"
#include "harness/run/sharded_run.h"
#include "properties/doubles/nccl_worlds.h"

namespace nccl_worlds {

class Ranks final : public harness::Ranks {
 public:
  // The seed of the plan becomes each case's.
  explicit Ranks(Arrangement arrangement) : arrangement_(std::move(arrangement)) {}

  harness::Steps train(const harness::Case& given, const golden::Run& run) override {
    harness::Case c = given;
    c.options.set("gather", "copied");  // ranks with a GPU each have no memory in common
    const auto run_world = [this](const harness::Case& now, const harness::RankBody& body) {
      arrangement_.plan.seed = now.seed + 1;
      nccl_worlds::run(now.mesh.size(), arrangement_, [&body](const auto& comm) {
        at::set_num_threads(1);  // of this rank's thread: products add in another order with more
        body(comm);
      });
    };
    return harness::run_sharded({c, run, run_world});
  }

 private:
  Arrangement arrangement_;
};

inline std::unique_ptr<harness::Ranks> ranks(Arrangement arrangement) {
  return std::make_unique<Ranks>(std::move(arrangement));
}

}  // namespace nccl_worlds
