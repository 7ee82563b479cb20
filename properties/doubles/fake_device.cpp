#include "properties/doubles/fake_device.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <deque>
#include <map>
#include <memory>
#include <mutex>

#include "properties/doubles/fake_math.h"
#include "properties/doubles/fake_parts.h"
#include "shardproof/device/device.h"

namespace fake_device {
namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr c10::StreamId kStreams = 64;  // of the pool, dealt out in turn

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
  c10::StreamId next = 0;
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
    return stream(1 + state().next++ % kStreams);
  }
  c10::Stream exchangeStream(c10::Stream to) const override { return stream(std::exchange(current, to.id())); }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    const std::lock_guard lock(state().mutex);
    if (!*event) *event = new Recorded;
    *static_cast<Recorded*>(*event) = {stream.id(), state().queues[stream.id()].queued};
  }
  void block(void* event, const c10::Stream& stream) const override {
    append(stream.id(), [wanted = *static_cast<Recorded*>(event)] { run(wanted.stream, wanted.until); });
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Recorded*>(event); }
  bool queryEvent(void* event) const override {
    const std::lock_guard lock(state().mutex);
    const auto* wanted = static_cast<Recorded*>(event);
    return state().queues[wanted->stream].done >= wanted->until;
  }
  void synchronizeEvent(void* event) const override {
    const std::lock_guard lock(state().mutex);
    run(static_cast<Recorded*>(event)->stream, static_cast<Recorded*>(event)->until);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    const std::lock_guard lock(state().mutex);
    run(stream.id(), state().queues[stream.id()].queued);
  }

 private:
  static c10::Stream stream(c10::StreamId id) { return c10::Stream(c10::Stream::UNSAFE, device(), id); }
};

const Guard guard;

// So that backwards order the streams as they do on any accelerator.
class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::Device getDeviceFromPtr(void*) const override { return device(); }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
};

}  // namespace

void install() {
  static const bool once = [] {
    static Hooks hooks;
    c10::register_privateuse1_backend("fake");
    at::RegisterPrivateUse1HooksInterface(&hooks);
    c10::impl::DeviceGuardImplRegistrar(kType, &guard);
    c10::SetAllocator(kType, &memory());
    register_operators();
    shardproof::use_device_math(kType, queued_math());
    return true;
  }();
  (void)once;
}

c10::Device device() {
  return {kType, 0};
}

c10::StreamId current_stream() {
  return current;
}

void queue(std::function<void()> work) {
  append(current, std::move(work));
}

void synchronize() {
  const c10::Stream stream = guard.getStream(device());
  guard.synchronizeStream(stream);
}

}  // namespace fake_device
