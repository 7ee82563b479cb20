#include "shardproof/comm/traced.h"

#include <fmt/format.h>

#include <algorithm>

namespace shardproof {
namespace {

class Traced final : public Comm {
 public:
  Traced(std::shared_ptr<Comm> inner, std::shared_ptr<Trace> trace, int64_t world_rank)
      : inner_(std::move(inner)), trace_(std::move(trace)), world_rank_(world_rank) {}

  int64_t rank() const override { return inner_->rank(); }
  int64_t size() const override { return inner_->size(); }
  const std::string& name() const override { return inner_->name(); }

  std::shared_ptr<Comm> split(int64_t color, int64_t key, std::string name) override {
    auto group = inner_->split(color, key, std::move(name));
    return group ? std::make_shared<Traced>(std::move(group), trace_, world_rank_) : nullptr;
  }
  at::Tensor shared_memory(int64_t bytes) override { return inner_->shared_memory(bytes); }
  bool premultiplies() const override { return inner_->premultiplies(); }
  c10::DataPtr allocate(Op op, int64_t bytes, c10::Device device) override { return inner_->allocate(op, bytes, device); }

  std::shared_ptr<Comm> split_ranks(const std::vector<int64_t>& ranks, std::string name) override {
    return std::make_shared<Traced>(inner_->split_ranks(ranks, std::move(name)), trace_, world_rank_);
  }

 private:
  Work start(Call call) override {
    const auto bytes = [](const at::Tensor& tensor) {
      return tensor.defined() ? static_cast<int64_t>(tensor.nbytes()) : int64_t{0};
    };
    trace_->add(world_rank_, {.op = to_string(call.op), .group = name(), .call = describe(call),
                              .bytes = std::max(bytes(call.input), bytes(call.output))});
    return inner_->issue(std::move(call));
  }

  std::shared_ptr<Comm> inner_;
  std::shared_ptr<Trace> trace_;
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
  const int64_t rank = inner->rank();
  return std::make_shared<Traced>(std::move(inner), std::move(trace), rank);
}

}  // namespace shardproof
