// Ranks that train well and then say something else: what a bug would leave, for tests of those who look at it.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "harness/run/ranks.h"

namespace harness {

class LyingRanks final : public Ranks {
 public:
  using Steps = std::vector<std::vector<RankStep>>;  // [step][rank]
  using Plant = std::function<void(Steps& steps)>;

  explicit LyingRanks(Plant plant) : plant_(std::move(plant)) {}

  Steps train(const Case& c, const golden::Run& run) override {
    Steps steps = thread_ranks().train(c, run);
    plant_(steps);
    return steps;
  }

 private:
  Plant plant_;
};

}  // namespace harness
