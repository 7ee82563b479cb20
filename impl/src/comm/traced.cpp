#include "shardproof/comm/traced.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "shardproof/comm/decorated.h"
#include "shardproof/comm/timeline.h"
#include "internal/base/call_label.h"

namespace shardproof {
namespace {

// A collective that is measured until its rank knows that it is complete.
class Measured final : public Work::State {
 public:
  Measured(std::shared_ptr<Timeline> timeline, int64_t rank, Span span)
      : timeline_(std::move(timeline)), rank_(rank), wait_(span), number_(timeline_->begin(rank, std::move(span))) {
    wait_.kind = Span::Kind::wait;
  }
  ~Measured() override { finish(); }
  void set(Work work) { work_ = std::move(work); }
  void wait() override {
    if (finished_) return;
    const int64_t waiting = timeline_->begin(rank_, wait_);
    work_.wait();
    timeline_->end(rank_, waiting);
    finish();
  }

 private:
  void finish() {
    if (!std::exchange(finished_, true)) timeline_->end(rank_, number_);
  }

  std::shared_ptr<Timeline> timeline_;
  int64_t rank_;
  Span wait_;
  int64_t number_;
  Work work_;
  bool finished_ = false;
};

class Traced final : public DecoratedComm {
 public:
  Traced(std::shared_ptr<Comm> inner, std::shared_ptr<Trace> trace, std::shared_ptr<Timeline> timeline, int64_t world_rank)
      : DecoratedComm(std::move(inner)), trace_(std::move(trace)), timeline_(std::move(timeline)), world_rank_(world_rank) {}

  const std::shared_ptr<Timeline>& timeline() const { return timeline_; }

 private:
  std::shared_ptr<Comm> decorate(std::shared_ptr<Comm> group) override {
    return std::make_shared<Traced>(std::move(group), trace_, timeline_, world_rank_);
  }

  Work start(Call call) override {
    const auto bytes = [](const at::Tensor& tensor) {
      return tensor.defined() ? static_cast<int64_t>(tensor.nbytes()) : int64_t{0};
    };
    const int64_t larger = std::max(bytes(call.input), bytes(call.output));
    trace_->add(world_rank_, {.op = to_string(call.op), .group = name(), .call = describe(call), .bytes = larger});
    if (!timeline_) return inner().issue(std::move(call));
    auto measured = std::make_shared<Measured>(timeline_, world_rank_, Span{.kind = Span::Kind::collective,
                                                                            .name = to_string(call.op),
                                                                            .unit = std::string(CallLabel::current()),
                                                                            .group = name(),
                                                                            .bytes = larger});
    measured->set(inner().issue(std::move(call)));
    return Work(std::move(measured));
  }

  std::shared_ptr<Trace> trace_;
  std::shared_ptr<Timeline> timeline_;  // null: calls are not measured
  int64_t world_rank_;
};

}  // namespace

void Trace::add(int64_t rank, TraceRecord record) {
  const std::lock_guard lock(mutex_);
  records_[rank].push_back(std::move(record));
}

std::vector<TraceRecord> Trace::of_rank(int64_t rank) const {
  const std::lock_guard lock(mutex_);
  const auto found = records_.find(rank);
  return found == records_.end() ? std::vector<TraceRecord>{} : found->second;
}

std::string Trace::summary(int64_t rank) const {
  std::map<std::pair<std::string, std::string>, std::pair<int64_t, int64_t>> rows;
  for (const TraceRecord& record : of_rank(rank)) {
    auto& [calls, bytes] = rows[{record.group, record.op}];
    ++calls;
    bytes += record.bytes;
  }
  std::string text = fmt::format("{:<16} {:<16} {:>8} {:>14}\n", "group", "op", "calls", "bytes");
  for (const auto& [key, row] : rows)
    text += fmt::format("{:<16} {:<16} {:>8} {:>14}\n", key.first, key.second, row.first, row.second);
  return text;
}

std::string Trace::first_disagreement(const std::string& group) const {
  const std::lock_guard lock(mutex_);
  int64_t first_rank = -1;
  std::vector<TraceRecord> expected;
  for (const auto& [rank, records] : records_) {
    std::vector<TraceRecord> own;
    std::copy_if(records.begin(), records.end(), std::back_inserter(own),
                 [&](const TraceRecord& record) { return record.group == group; });
    if (first_rank < 0) {
      first_rank = rank;
      expected = std::move(own);
      continue;
    }
    for (size_t i = 0; i < std::max(own.size(), expected.size()); ++i) {
      const std::string a = i < expected.size() ? expected[i].call : "nothing", b = i < own.size() ? own[i].call : "nothing";
      if (a != b) return fmt::format("call {} in '{}': rank {} {}, rank {} {}", i, group, first_rank, a, rank, b);
    }
  }
  return "";
}

std::shared_ptr<Comm> traced(std::shared_ptr<Comm> inner, std::shared_ptr<Trace> trace) {
  return traced(std::move(inner), std::move(trace), nullptr);
}

std::shared_ptr<Comm> traced(std::shared_ptr<Comm> inner, std::shared_ptr<Trace> trace, std::shared_ptr<Timeline> timeline) {
  const int64_t rank = inner->rank();
  return std::make_shared<Traced>(std::move(inner), std::move(trace), std::move(timeline), rank);
}

std::shared_ptr<Timeline> timeline_of(const Comm& comm) {
  const auto* measured = dynamic_cast<const Traced*>(&comm);
  return measured ? measured->timeline() : nullptr;
}

}  // namespace shardproof
