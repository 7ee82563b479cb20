#include "fake_device.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "shardproof/cuda.h"
#include "shardproof/device.h"

namespace fake_device {
namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

// Work queued on one stream, numbered from 0. An event is a place in such a queue.
struct Queue {
  std::deque<std::function<void()>> work;
  int64_t done = 0, queued = 0;
};
struct Recorded {
  c10::StreamId stream = 0;
  int64_t until = 0;
};

struct State {
  std::recursive_mutex mutex;
  std::map<c10::StreamId, Queue> queues;
  c10::StreamId next = 1;
};
State& state() {
  static State one;
  return one;
}
thread_local c10::StreamId current = 0;

void run(c10::StreamId stream, int64_t until) {
  Queue& queue = state().queues[stream];
  while (queue.done < until) {
    const std::function<void()> work = std::move(queue.work.front());
    queue.work.pop_front();
    ++queue.done;
    work();
  }
}

void append(c10::StreamId stream, std::function<void()> work) {
  const std::lock_guard lock(state().mutex);
  Queue& queue = state().queues[stream];
  queue.work.push_back(std::move(work));
  ++queue.queued;
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return device(); }
  c10::Device getDevice() const override { return device(); }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return stream(current); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    const std::lock_guard lock(state().mutex);
    return stream(state().next++);
  }
  c10::Stream exchangeStream(c10::Stream to) const override { return stream(std::exchange(current, to.id())); }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    const std::lock_guard lock(state().mutex);
    *event = new Recorded{stream.id(), state().queues[stream.id()].queued};
  }
  void block(void* event, const c10::Stream& stream) const override {
    append(stream.id(), [wanted = *static_cast<Recorded*>(event)] { run(wanted.stream, wanted.until); });
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Recorded*>(event); }
  void synchronizeStream(const c10::Stream& stream) const override {
    const std::lock_guard lock(state().mutex);
    run(stream.id(), state().queues[stream.id()].queued);
  }

 private:
  static c10::Stream stream(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, device(), id); }
};

// The twin, on the current stream. Only what collectives use.
class QueuedMath final : public shardproof::DeviceMath {
 public:
  void reduce(shardproof::Element type, shardproof::Fold fold, std::span<const std::byte* const> terms, int64_t count,
              std::byte* target) const override {
    for (int k = 0; k < 5; ++k) std::this_thread::yield();  // others may look meanwhile
    queue([=, twin = twin_, kept = std::vector(terms.begin(), terms.end())] { twin->reduce(type, fold, kept, count, target); });
  }
  void copy(void* target, const void* source, int64_t bytes) const override {
    queue([=, twin = twin_] { twin->copy(target, source, bytes); });
  }
  void zero(void*, int64_t) const override { refuse(); }
  void sum_wide(shardproof::Element, std::span<const std::byte* const>, int64_t, shardproof::Element,
                std::byte*) const override {
    refuse();
  }
  void sgd(const shardproof::SgdScalars&, const shardproof::UpdateArrays&) const override { refuse(); }
  void adam(const shardproof::AdamScalars&, const shardproof::UpdateArrays&) const override { refuse(); }
  void lion(const shardproof::LionScalars&, const shardproof::UpdateArrays&) const override { refuse(); }
  void store(float*, shardproof::Element, const std::byte*, int64_t, bool) const override { refuse(); }
  bool store_fixed(int64_t*, shardproof::Element, const std::byte*, int64_t, bool, double, double, double) const override {
    refuse();
  }
  void fixed_to_float(float*, const int64_t*, int64_t, float) const override { refuse(); }
  void divide(float*, int64_t, float) const override { refuse(); }
  void scale(float*, int64_t, float) const override { refuse(); }
  int64_t first_beyond(shardproof::Element, const std::byte*, int64_t, double) const override { refuse(); }
  bool all_zero(shardproof::Element, const std::byte*, int64_t) const override { refuse(); }
  void exact_sum(std::span<const shardproof::FlatSpan>, bool, std::span<int64_t>) const override { refuse(); }

 private:
  [[noreturn]] static void refuse() { throw std::logic_error("the fake device does only what collectives ask for"); }
  std::shared_ptr<const shardproof::DeviceMath> twin_ = shardproof::kernel_twin();
};

const Guard guard;

}  // namespace

void install() {
  static const bool once = [] {
    c10::impl::DeviceGuardImplRegistrar(kType, &guard);
    shardproof::use_device_math(kType, std::make_shared<QueuedMath>());
    return true;
  }();
  (void)once;
}

c10::Device device() {
  return {kType, 0};
}

at::Tensor allocate(int64_t numel, at::ScalarType dtype) {
  const size_t bytes = static_cast<size_t>(numel) * c10::elementSize(dtype);
  void* memory = std::calloc(1, std::max<size_t>(bytes, 1));
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(memory, memory, &std::free, device()),
                       /*allocator=*/nullptr, /*resizable=*/false);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::scalarTypeToTypeMeta(dtype));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous({numel});
  return tensor;
}

void queue(std::function<void()> work) {
  append(current, std::move(work));
}

void synchronize() {
  const c10::Stream stream = guard.getStream(device());
  guard.synchronizeStream(stream);
}

}  // namespace fake_device
