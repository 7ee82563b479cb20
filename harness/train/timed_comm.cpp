#include "harness/train/timed_comm.h"

#include <utility>

namespace harness {
namespace {

using namespace shardproof;

class TimedWait final : public Work::State {
 public:
  TimedWait(Work work, std::shared_ptr<CallTime> time) : work_(std::move(work)), time_(std::move(time)) {}
  void wait() override {
    time_->timed([&] { work_.wait(); });
  }

 private:
  Work work_;
  std::shared_ptr<CallTime> time_;
};

class Timed final : public Comm {
 public:
  Timed(std::shared_ptr<Comm> inner, std::shared_ptr<CallTime> time) : inner_(std::move(inner)), time_(std::move(time)) {}

  int64_t rank() const override { return inner_->rank(); }
  int64_t size() const override { return inner_->size(); }
  const std::string& name() const override { return inner_->name(); }
  std::shared_ptr<Comm> split(int64_t color, int64_t key, std::string name) override {
    auto group = time_->timed([&] { return inner_->split(color, key, std::move(name)); });
    return group ? timed(std::move(group), time_) : nullptr;
  }
  std::shared_ptr<Comm> split_ranks(const std::vector<int64_t>& ranks, std::string name) override {
    return timed(time_->timed([&] { return inner_->split_ranks(ranks, std::move(name)); }), time_);
  }
  at::Tensor shared_memory(int64_t bytes) override {
    return time_->timed([&] { return inner_->shared_memory(bytes); });
  }
  bool premultiplies() const override { return inner_->premultiplies(); }
  c10::DataPtr allocate(Op op, int64_t bytes, c10::Device device) override {
    return time_->timed([&] { return inner_->allocate(op, bytes, device); });
  }

 private:
  Work start(Call call) override {
    Work work = time_->timed([&] { return inner_->issue(std::move(call)); });
    return Work(std::make_shared<TimedWait>(std::move(work), time_));
  }

  std::shared_ptr<Comm> inner_;
  std::shared_ptr<CallTime> time_;
};

}  // namespace

std::shared_ptr<Comm> timed(std::shared_ptr<Comm> inner, std::shared_ptr<CallTime> time) {
  return std::make_shared<Timed>(std::move(inner), std::move(time));
}

}  // namespace harness
