#include "harness/train/timed_comm.h"

#include <utility>

#include "shardproof/comm/decorated.h"

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

class Timed final : public DecoratedComm {
 public:
  Timed(std::shared_ptr<Comm> inner, std::shared_ptr<CallTime> time)
      : DecoratedComm(std::move(inner)), time_(std::move(time)) {}

  std::shared_ptr<Comm> split(int64_t color, int64_t key, std::string name) override {
    return time_->timed([&] { return DecoratedComm::split(color, key, std::move(name)); });
  }
  std::shared_ptr<Comm> split_ranks(const std::vector<int64_t>& ranks, std::string name) override {
    return time_->timed([&] { return DecoratedComm::split_ranks(ranks, std::move(name)); });
  }
  at::Tensor shared_memory(int64_t bytes) override {
    return time_->timed([&] { return DecoratedComm::shared_memory(bytes); });
  }
  c10::DataPtr allocate(Op op, int64_t bytes, c10::Device device) override {
    return time_->timed([&] { return DecoratedComm::allocate(op, bytes, device); });
  }

 private:
  std::shared_ptr<Comm> decorate(std::shared_ptr<Comm> group) override { return timed(std::move(group), time_); }

  Work start(Call call) override {
    Work work = time_->timed([&] { return inner().issue(std::move(call)); });
    return Work(std::make_shared<TimedWait>(std::move(work), time_));
  }

  std::shared_ptr<CallTime> time_;
};

}  // namespace

std::shared_ptr<Comm> timed(std::shared_ptr<Comm> inner, std::shared_ptr<CallTime> time) {
  return std::make_shared<Timed>(std::move(inner), std::move(time));
}

}  // namespace harness
