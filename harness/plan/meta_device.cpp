#include "harness/plan/meta_device.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <c10/core/Allocator.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <vector>

#include "harness/plan/meta_kernels.h"
#include "harness/plan/meta_math.h"
#include "harness/plan/operator_cost.h"
#include "shardproof/base/check.h"
#include "shardproof/device/device.h"

namespace harness {
namespace {

struct Counter {
  std::atomic<int64_t> now = 0, peak = 0;
  void add(int64_t bytes) {
    const int64_t sum = now += bytes;
    for (int64_t most = peak; sum > most && !peak.compare_exchange_weak(most, sum);) {
    }
  }
};

// Of the MetaDevice that lives; null when there is none.
std::shared_ptr<Counter>& current_counter() {
  static std::shared_ptr<Counter> one;
  return one;
}

struct Block {
  std::shared_ptr<Counter> counter;
  int64_t bytes;
};

// Addresses ascend and are never given twice. No address of a process lies so high, so that following one is a fault.
class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    auto* block = new Block{current_counter(), static_cast<int64_t>(bytes)};
    if (block->counter) block->counter->add(block->bytes);
    const uint64_t address = next_.fetch_add((bytes + 127) / 64 * 64);
    return {reinterpret_cast<void*>(address), block, &release, c10::Device(at::kMeta)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, std::size_t) const override {}

 private:
  static void release(void* context) {
    const std::unique_ptr<Block> block(static_cast<Block*>(context));
    if (block->counter) block->counter->add(-block->bytes);
  }
  std::atomic<uint64_t> next_ = uint64_t{1} << 60;
};

// From then on, for the whole process: blocks may outlive a MetaDevice.
void install_once() {
  static std::once_flag once;
  std::call_once(once, [] {
    static CountingAllocator allocator;
    c10::SetAllocator(at::kMeta, &allocator, /*priority=*/255);
    shardproof::use_device_math(at::kMeta, meta_math());
  });
}

// Operators call others. What counts is the innermost one that moves something; a composed one has nothing of its own.
struct Frame final : at::ObserverContext {
  std::vector<OperatorTensor> inputs;  // LibTorch shows them at the beginning only
  bool has_parts = false;
};
thread_local std::vector<Frame*> frames;

std::unique_ptr<at::ObserverContext> enter(const at::RecordFunction& function) {
  auto frame = std::make_unique<Frame>();
  for (const c10::IValue& value : function.inputs()) add_tensors(value, frame->inputs);
  frames.push_back(frame.get());
  return frame;
}

void leave(const at::RecordFunction& function, at::ObserverContext* context) {
  auto* const frame = static_cast<Frame*>(context);
  frames.pop_back();
  if (!frame->has_parts) {
    std::vector<OperatorTensor> outputs;
    for (const c10::IValue& value : function.outputs()) add_tensors(value, outputs);
    const std::optional<Operator> what = operator_of(function.name(), function.overload_name(), frame->inputs, outputs);
    frame->has_parts = what.has_value();
    if (what) record_operator(*what);
  }
  if (frame->has_parts && !frames.empty()) frames.back()->has_parts = true;
}

}  // namespace

void record_inside(const Operator& what) {
  record_operator(what);
  if (!frames.empty()) frames.back()->has_parts = true;
}

struct MetaDevice::Parts {
  std::shared_ptr<Counter> counter = std::make_shared<Counter>();
  std::unique_ptr<torch::Library> kernels;
  std::unique_ptr<torch::Library> autograd_kernels;
  at::CallbackHandle callback = 0;
};

MetaDevice::MetaDevice(StepRecorder& recorder) : parts_(std::make_unique<Parts>()) {
  install_once();
  SHARD_CHECK(current_counter() == nullptr, "plan", "a process has one MetaDevice at a time");
  current_counter() = parts_->counter;
  record_operators_in(&recorder);
  parts_->kernels = meta_kernels();
  parts_->autograd_kernels = meta_autograd_kernels();
  parts_->callback = at::addThreadLocalCallback(
      at::RecordFunctionCallback(&enter, &leave).needsInputs(true).needsOutputs(true).scopes({at::RecordScope::FUNCTION}));
}

MetaDevice::~MetaDevice() {
  at::removeCallback(parts_->callback);
  record_operators_in(nullptr);
  current_counter().reset();
}

int64_t MetaDevice::bytes() const {
  return parts_->counter->now;
}
int64_t MetaDevice::peak_bytes() const {
  return parts_->counter->peak;
}
void MetaDevice::reset_peak() {
  parts_->counter->peak = parts_->counter->now.load();
}

}  // namespace harness
