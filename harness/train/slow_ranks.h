// Ranks that hold up the others: those that compute much longer than the median of all ranks, step after step. No Torch.
#pragma once

#include <cstdint>
#include <vector>

namespace harness {

// Twice the median, in so many steps in a row.
constexpr double kSlowFactor = 2;
constexpr int64_t kSlowSteps = 5;

struct SlowRank {
  int64_t rank = 0;
  double seconds = 0;  // that it computed in this step
  double median = 0;   // of all ranks; of an even number of them the lower one of the two
  int64_t steps = 0;   // in a row in which it was slow, at least kSlowSteps
};

class SlowRanks {
 public:
  // Of each rank the seconds that it computed in a step. Returns those that have been slow for kSlowSteps or more, ascending.
  std::vector<SlowRank> add(const std::vector<double>& seconds);

 private:
  std::vector<int64_t> steps_;  // in a row, of each rank
};

}  // namespace harness
