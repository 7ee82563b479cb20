#include "harness/compare/step_exchange.h"

#include <torch/nn/module.h>

#include <algorithm>

#include "shardproof/nn/state_buffers.h"

namespace harness {
namespace {
constexpr size_t kStepsAheadMax = 2;
}

std::vector<std::pair<std::string, at::Tensor>> state_buffers(const torch::nn::Module& module) {
  std::vector<std::pair<std::string, at::Tensor>> copies;
  for (const auto& [name, buffer] : shardproof::buffers_of(module).state)
    if (buffer.scalar_type() == at::kFloat) copies.emplace_back(name, buffer.to(at::kCPU, at::kFloat, false, true));
  return copies;
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
