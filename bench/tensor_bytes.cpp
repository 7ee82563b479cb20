#include "bench/tensor_bytes.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <unordered_map>

namespace bench {
namespace {

struct Count {
  std::atomic<int64_t> now = 0, peak = 0;
};

// Tensors may outlive the thread that made them, and another thread may free them.
const std::shared_ptr<Count>& of_thread() {
  static thread_local const auto count = std::make_shared<Count>();
  return count;
}

struct Block {
  std::shared_ptr<Count> count;
  int64_t bytes;
};

// By address, beside the memory: LibTorch asks the CPU's allocator for pointers that free themselves by nothing but their
// address.
class CountingAllocator final : public c10::Allocator {
 public:
  explicit CountingAllocator(c10::Allocator* inner) : inner_(inner) {}

  c10::DataPtr allocate(size_t size) override {
    void* const data = inner_->raw_allocate(size);
    if (data) {
      const Block block{of_thread(), static_cast<int64_t>(size)};
      const int64_t now = block.count->now += block.bytes;
      block.count->peak = std::max(block.count->peak.load(), now);  // only this thread raises it
      const std::lock_guard lock(mutex_);
      blocks_[data] = block;
    }
    return {data, data, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { inner_->copy_data(to, from, bytes); }

 private:
  static void release(void* data);
  void forget(void* data) {
    {
      const std::lock_guard lock(mutex_);
      if (const auto found = blocks_.find(data); found != blocks_.end()) {
        found->second.count->now -= found->second.bytes;
        blocks_.erase(found);
      }
    }
    inner_->raw_deallocate(data);
  }

  c10::Allocator* inner_;
  std::mutex mutex_;
  std::unordered_map<void*, Block> blocks_;
};

// Lives as long as the process, since tensors are freed until its end.
CountingAllocator& counting() {
  static auto* const allocator = new CountingAllocator(c10::GetCPUAllocator());
  return *allocator;
}

void CountingAllocator::release(void* data) {
  if (data) counting().forget(data);
}

}  // namespace

void count_tensors() {
  c10::SetCPUAllocator(&counting(), /*priority=*/255);
}

int64_t peak_tensor_bytes() {
  return of_thread()->peak;
}

void reset_peak_tensor_bytes() {
  of_thread()->peak = of_thread()->now.load();
}

}  // namespace bench
