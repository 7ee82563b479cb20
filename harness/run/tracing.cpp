#include "harness/run/tracing.h"

#include <fmt/format.h>

#include "shardproof/comm/traced.h"

namespace harness {

using namespace shardproof;

std::shared_ptr<Comm> Tracing::around(std::shared_ptr<Comm> comm) const {
  return ranks ? traced(std::move(comm), std::make_shared<Trace>(), timeline) : comm;
}

std::string Tracing::last_collective(int64_t rank) const {
  const std::vector<Span> spans = timeline->of_rank(rank);
  for (auto span = spans.rbegin(); span != spans.rend(); ++span)
    if (span->kind == Span::Kind::collective)
      return fmt::format("{}{}{} in '{}'", span->name, span->unit.empty() ? "" : " of ", span->unit, span->group);
  return "";
}

std::vector<ModuleCall> calls_of(const ModuleWatch& watch, const torch::nn::Module& root) {
  std::vector<ModuleCall> calls{ModuleCall{}};
  for (const auto& item : root.named_buffers()) calls.front().parameters.emplace_back(item.key(), item.value().clone());
  calls.insert(calls.end(), watch.calls().begin(), watch.calls().end());
  return calls;
}

}  // namespace harness
