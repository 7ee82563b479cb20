#include "harness/train/slow_ranks.h"

#include <algorithm>

namespace harness {

std::vector<SlowRank> SlowRanks::add(const std::vector<double>& seconds) {
  std::vector<SlowRank> slow;
  if (seconds.empty()) return slow;
  steps_.resize(seconds.size(), 0);
  std::vector<double> sorted = seconds;
  const auto middle = sorted.begin() + (std::ssize(sorted) - 1) / 2;
  std::nth_element(sorted.begin(), middle, sorted.end());
  for (size_t rank = 0; rank < seconds.size(); ++rank) {
    steps_[rank] = seconds[rank] > kSlowFactor * *middle ? steps_[rank] + 1 : 0;
    if (steps_[rank] >= kSlowSteps) slow.push_back({static_cast<int64_t>(rank), seconds[rank], *middle, steps_[rank]});
  }
  return slow;
}

}  // namespace harness
