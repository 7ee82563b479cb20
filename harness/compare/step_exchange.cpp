#include "harness/compare/step_exchange.h"

#include <algorithm>

namespace harness {
namespace {
constexpr size_t kStepsAheadMax = 2;
}

bool StepExchange::put(size_t rank, RankStep step) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return closed_ || queues_[rank].size() < kStepsAheadMax; });
  if (closed_) return false;
  queues_[rank].push_back(std::move(step));
  changed_.notify_all();
  return true;
}

std::optional<std::vector<RankStep>> StepExchange::take() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return closed_ || complete(); });
  if (!complete()) return std::nullopt;
  std::vector<RankStep> steps;
  for (auto& queue : queues_) {
    steps.push_back(std::move(queue.front()));
    queue.pop_front();
  }
  changed_.notify_all();
  return steps;
}

void StepExchange::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  changed_.notify_all();
}

bool StepExchange::complete() const {
  return std::none_of(queues_.begin(), queues_.end(), [](const auto& queue) { return queue.empty(); });
}

}  // namespace harness
