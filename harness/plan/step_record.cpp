#include "harness/plan/step_record.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <numeric>
#include <utility>

#include "shardproof/base/check.h"
#include "shardproof/comm/decorated.h"

namespace harness {

size_t StepRecorder::group(std::string name, std::vector<int64_t> ranks) {
  record_.groups.push_back({std::move(name), std::move(ranks)});
  return record_.groups.size() - 1;
}

void StepRecorder::compute(const Operator& what) {
  record_.events.push_back({StepEvent::Kind::compute, record_.operators.size()});
  record_.operators.push_back(what);
}

size_t StepRecorder::start(const Collective& what) {
  record_.events.push_back({StepEvent::Kind::start, record_.collectives.size()});
  record_.collectives.push_back(what);
  return forgotten_ + record_.collectives.size() - 1;
}

void StepRecorder::wait(size_t collective) {
  if (collective >= forgotten_) record_.events.push_back({StepEvent::Kind::wait, collective - forgotten_});
}

void StepRecorder::clear() {
  forgotten_ += record_.collectives.size();
  record_.events.clear();
  record_.operators.clear();
  record_.collectives.clear();
}

namespace {

using namespace shardproof;

class Awaited final : public Work::State {
 public:
  Awaited(Work work, StepRecorder& recorder, size_t collective)
      : work_(std::move(work)), recorder_(recorder), collective_(collective) {}
  void wait() override {
    work_.wait();
    recorder_.wait(collective_);
  }

 private:
  Work work_;
  StepRecorder& recorder_;
  size_t collective_;
};

class Recorded final : public DecoratedComm {
 public:
  Recorded(std::shared_ptr<Comm> inner, StepRecorder& recorder, std::vector<int64_t> ranks)
      : DecoratedComm(std::move(inner)), recorder_(recorder), group_(recorder.group(name(), std::move(ranks))) {}

  at::Tensor shared_memory(int64_t bytes) override {
    if (at::Tensor memory = inner().shared_memory(bytes); memory.defined()) return memory;
    recorder_.share(bytes - bytes / size());
    return at::empty({bytes}, at::TensorOptions(at::kByte).device(at::kMeta));
  }
  std::shared_ptr<Comm> split(int64_t, int64_t, std::string name) override { refuse(name); }
  std::shared_ptr<Comm> split_ranks(const std::vector<int64_t>& ranks, std::string name) override {
    std::vector<int64_t> of_world;
    for (const int64_t rank : ranks) of_world.push_back(recorder_.record().groups[group_].ranks[static_cast<size_t>(rank)]);
    return std::make_shared<Recorded>(inner().split_ranks(ranks, std::move(name)), recorder_, std::move(of_world));
  }

 private:
  // One rank alone cannot split by colors (counted.h), so the ranks of each group are listed.
  [[noreturn]] static void refuse(const std::string& group) {
    throw BrokenInvariant("[plan] the ranks of group '" + group + "' are not listed");
  }
  std::shared_ptr<Comm> decorate(std::shared_ptr<Comm> group) override { refuse(group->name()); }

  Work start(Call call) override {
    const auto bytes = [](const at::Tensor& tensor) { return tensor.defined() ? static_cast<int64_t>(tensor.nbytes()) : 0; };
    const at::DisableRecordFunctionGuard quiet;  // how a rank alone makes up its results is no part of its step
    const at::Tensor& sent = call.input.defined() ? call.input : call.output;
    const at::ScalarType dtype = sent.defined() ? sent.scalar_type() : at::kFloat;
    const int64_t others = std::ranges::count_if(call.input_sizes, [](int64_t size) { return size > 0; });
    const bool to_one = others == 1 && call.input_sizes[static_cast<size_t>(rank())] == 0;
    const size_t collective =
        recorder_.start({call.op, group_, std::max(bytes(call.input), bytes(call.output)), dtype, to_one});
    return Work(std::make_shared<Awaited>(inner().issue(std::move(call)), recorder_, collective));
  }

  StepRecorder& recorder_;
  size_t group_;
};

}  // namespace

std::shared_ptr<Comm> recorded(std::shared_ptr<Comm> inner, StepRecorder& recorder) {
  std::vector<int64_t> ranks(static_cast<size_t>(inner->size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return std::make_shared<Recorded>(std::move(inner), recorder, std::move(ranks));
}

}  // namespace harness
