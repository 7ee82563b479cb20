#include "shardproof/comm/timeline.h"

#include <algorithm>
#include <chrono>

#include "shardproof/base/check.h"

namespace shardproof {
namespace {

int64_t now_ns() {
  const auto since = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

}  // namespace

int64_t Timeline::begin(int64_t rank, Span span) {
  const std::lock_guard lock(mutex_);
  Rank& own = ranks_[rank];
  if (span.unit.empty() && !own.open.empty()) span.unit = own.spans[own.open.back()].unit;
  const auto number = std::ssize(own.spans);
  if (span.kind == Span::Kind::computation) own.open.push_back(number);
  span.end_ns = -1;
  span.begin_ns = now_ns();
  own.spans.push_back(std::move(span));
  return number;
}

void Timeline::end(int64_t rank, int64_t number) {
  const int64_t now = now_ns();
  const std::lock_guard lock(mutex_);
  Rank& own = ranks_[rank];
  SHARD_CHECK(number >= 0 && number < std::ssize(own.spans) && own.spans[number].end_ns < 0, "timeline",
              "rank {} ends span {} of {}, which is not open", rank, number, own.spans.size());
  own.spans[number].end_ns = now;
  std::erase(own.open, number);
}

std::vector<Span> Timeline::of_rank(int64_t rank) const {
  const std::lock_guard lock(mutex_);
  const auto found = ranks_.find(rank);
  if (found == ranks_.end()) return {};
  std::vector<Span> spans = found->second.spans;
  const int64_t now = now_ns();
  for (Span& span : spans)
    if (span.end_ns < 0) span.end_ns = now;
  return spans;
}

}  // namespace shardproof
