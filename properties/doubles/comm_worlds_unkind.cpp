// Worlds of rank-threads inside process groups of PyTorch whose backend is as unkind as NCCL's. What a property has on the CPU
// travels on the fake device, but for messages, for which such a group has no tags.
#include <gtest/gtest.h>

#include "properties/doubles/comm_worlds.h"
#include "properties/doubles/fake_device.h"
#include "properties/doubles/unkind_groups.h"
#include "shardproof/base/check.h"
#include "shardproof/comm/decorated.h"

namespace worlds {
namespace {

using shardproof::Call;
using shardproof::DecoratedComm;
using shardproof::Op;
using shardproof::ThreadsOptions;
using shardproof::Work;

class ThereAndBack final : public Work::State {
 public:
  ThereAndBack(Work work, at::Tensor there, at::Tensor here)
      : work_(std::move(work)), there_(std::move(there)), here_(std::move(here)) {}
  void wait() override {
    work_.wait();
    if (here_.defined()) here_.view({-1}).copy_(there_);
  }

 private:
  Work work_;
  at::Tensor there_, here_;
};

class OnDevice final : public DecoratedComm {
 public:
  explicit OnDevice(std::shared_ptr<Comm> inner) : DecoratedComm(std::move(inner)) {}

 private:
  std::shared_ptr<Comm> decorate(std::shared_ptr<Comm> group) override { return std::make_shared<OnDevice>(std::move(group)); }
  Work start(Call call) override {
    if (call.op == Op::barrier || call.op == Op::send || call.op == Op::recv) return inner().issue(std::move(call));
    const at::Tensor output = call.output;
    const bool one = call.input.is_same(call.output);
    if (call.input.defined()) call.input = call.input.to(fake_device::device());
    if (output.defined()) call.output = one ? call.input : output.to(fake_device::device()).view({-1});
    const at::Tensor there = call.output;
    return Work(std::make_shared<ThereAndBack>(inner().issue(std::move(call)), there, output));
  }
};

}  // namespace

int64_t ranks_max() {
  return 5;
}

bool one_host() {
  return true;
}

bool finishes_sums(const ThreadsOptions&) {
  return false;
}

std::vector<ThreadsOptions> all_options() {
  std::vector<ThreadsOptions> list;
  for (const auto schedule : {ThreadsOptions::Schedule::parallel, ThreadsOptions::Schedule::serial})
    list.push_back({.schedule = schedule, .seed = 1});
  return list;
}

void run(int64_t world, const Body& body, const ThreadsOptions& options) {
  fake_device::install();
  ThreadsOptions on_device = options;
  on_device.device = fake_device::device();
  on_device.completion = ThreadsOptions::Completion::eager;
  shardproof::run_threads(
      world, [&](std::shared_ptr<Comm> comm) { body(std::make_shared<OnDevice>(unkind::world_over(comm))); }, on_device);
}

std::string agree(const std::string& found) {
  return found;
}

std::string error_of(int64_t world, const Body& body, const ThreadsOptions& options) {
  try {
    run(world, body, options);
  } catch (const shardproof::Error& error) {
    return error.what();
  }
  ADD_FAILURE() << "the world ended well";
  return "";
}

}  // namespace worlds
