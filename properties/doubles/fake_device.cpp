#include "properties/doubles/fake_device.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

#include "properties/doubles/fake_math.h"
#include "properties/doubles/fake_parts.h"
#include "shardproof/device/device.h"
#include "shardproof/device/device_graph.h"

namespace fake_device {
namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr c10::StreamId kStreams = 64;  // of the pool of a device, dealt out in turn
constexpr c10::StreamId kNext = 1000;   // from the streams of one device to those of the next

// Work queued on one stream, numbered from 0. An event is a place in such a queue.
struct Recorded : Moment {
  int64_t capture = 0;  // by number, in which it was recorded; 0 outside of any
};
struct Entry {
  std::function<void()> work;
  std::optional<Moment> wait;  // in the place of work
};
struct Queue {
  std::deque<Entry> work;
  int64_t done = 0, queued = 0;
};

// One run of `every_order`, which takes the choices given, and the first possible one after them; or of a policy.
struct Exploration {
  When when;
  std::shared_ptr<shardproof::SchedulePolicy> policy = {};
  std::vector<size_t> choices = {}, widths = {};
  size_t taken = 0;
  std::vector<c10::StreamId> streams = {};  // in the order in which they were first used
  std::vector<int64_t> order = {};          // of the streams whose work ran

  // Of the streams at these places, or 0 to stop, where that is possible and the streams come after it.
  size_t choose(const std::vector<int64_t>& ready, bool may_stop) {
    if (!policy) return choose(ready.size() + (may_stop ? 1 : 0));
    using Actor = shardproof::SchedulePolicy::Actor;
    std::vector<shardproof::SchedulePolicy::Choice> offered;
    if (may_stop) offered.push_back({.actor = {Actor::Kind::rank, -1, 0}});
    for (const int64_t place : ready) offered.push_back({.actor = {Actor::Kind::host_thread, -1, place}, .awaited = !may_stop});
    return policy->choose(offered, may_stop ? 0 : -1);
  }
  size_t choose(size_t width) {
    if (width == 1) return 0;
    if (taken == choices.size()) choices.push_back(0);
    widths.resize(taken + 1);
    widths[taken] = width;
    return choices[taken++];
  }
  // The choices of the next run. False: there is none.
  bool advance() {
    choices.resize(taken);
    while (!choices.empty() && choices.back() + 1 == widths[choices.size() - 1]) choices.pop_back();
    if (choices.empty()) return false;
    ++choices.back();
    return true;
  }
};

// What replays do, in the order in which the host asked for it; whatever waits for it does so in this order too.
struct Captured {
  c10::DeviceIndex device = 0;
  bool is_broken = false;  // by a host that waited
  std::vector<std::function<void()>> work;
  std::vector<std::string> launches;
};

struct State {
  std::shared_ptr<Captured> capturing, last;
  int64_t pools = 0, not_captured = 0;
  std::recursive_mutex mutex;
  std::map<c10::StreamId, Queue> queues;
  c10::StreamId next = 0;
  Exploration* exploration = nullptr;
  bool running = false;  // work of a stream
  std::map<std::string, int64_t> waits;
};
State& state() {
  static State one;
  return one;
}
thread_local c10::DeviceIndex device_now = 0;
thread_local std::array<c10::StreamId, kDevices> current = {0, kNext};

// Where the call is of a capture: its number.
int64_t capture_number() { return captures() ? state().pools : 0; }

void require_sound_capture() {
  TORCH_CHECK(!captures() || !state().capturing->is_broken,
              "fake device: the host has waited inside of this capture, which takes no more work");
}

void run_first(Queue& queue) {
  const Entry entry = std::move(queue.work.front());
  queue.work.pop_front();
  ++queue.done;
  const std::shared_ptr<void> over(nullptr, [outer = std::exchange(state().running, true)](void*) { state().running = outer; });
  if (entry.work) entry.work();
}

// As late as it may be.
void run(c10::StreamId stream, int64_t until) {
  Queue& queue = state().queues[stream];
  while (queue.done < until) {
    if (const auto wait = queue.work.front().wait) run(wait->stream, wait->until);
    run_first(queue);
  }
}

// Any legal order: runs streams that nothing keeps from running, as chosen, until `enough` and the choice is to stop.
void run_some(Exploration& exploration, const std::function<bool()>& enough) {
  while (true) {
    std::vector<int64_t> ready;  // places in the order of first use
    for (size_t place = 0; place < exploration.streams.size(); ++place) {
      const Queue& queue = state().queues[exploration.streams[place]];
      if (queue.work.empty()) continue;
      const auto& wait = queue.work.front().wait;
      if (!wait || state().queues[wait->stream].done >= wait->until) ready.push_back(static_cast<int64_t>(place));
    }
    const size_t stops = enough() ? 1 : 0;
    if (stops == 1 && ready.empty()) return;
    TORCH_CHECK(!ready.empty(), "fake device: the host waits for work that no stream can come to");
    const size_t choice = exploration.choose(ready, stops == 1);
    if (choice < stops) return;
    const int64_t place = ready[choice - stops];
    Queue& queue = state().queues[exploration.streams[static_cast<size_t>(place)]];
    if (queue.work.front().work) exploration.order.push_back(place);
    run_first(queue);
  }
}

void wait_for(c10::StreamId stream, int64_t until) {
  Exploration* exploration = state().exploration;
  if (!exploration) return run(stream, until);
  run_some(*exploration, [&] { return state().queues[stream].done >= until; });
}

void append(c10::StreamId stream, Entry entry) {
  const std::lock_guard lock(state().mutex);
  Queue& queue = state().queues[stream];
  queue.work.push_back(std::move(entry));
  ++queue.queued;
  Exploration* exploration = state().exploration;
  if (!exploration || state().running) return;
  if (std::ranges::find(exploration->streams, stream) == exploration->streams.end()) exploration->streams.push_back(stream);
  if (exploration->when == When::between_calls) run_some(*exploration, [] { return true; });
}

void run_all() {
  const std::lock_guard lock(state().mutex);
  for (const auto& [stream, queue] : state().queues) run(stream, queue.queued);
}

class Graph final : public shardproof::DeviceGraph {
 public:
  explicit Graph(std::shared_ptr<const Captured> captured) : captured_(std::move(captured)) {}
  void replay() override {
    append(current_stream(), {.work = [captured = captured_] {
      for (const auto& work : captured->work) work();
    }, .wait = {}});
  }

 private:
  const std::shared_ptr<const Captured> captured_;
};

class Graphs final : public shardproof::DeviceGraphs {
 public:
  std::shared_ptr<shardproof::DeviceGraph> capture(const std::function<void()>& work) const override {
    run_all();
    const Contents before = contents();
    auto captured = std::make_shared<Captured>();
    captured->device = device_now;
    c10::StreamId& now = current[static_cast<size_t>(device_now)];
    const c10::StreamId outer = std::exchange(now, device_now * kNext + kStreams + 1);
    set_pool(++state().pools);
    state().capturing = captured;
    const std::shared_ptr<void> over(nullptr, [&](void*) {
      state().capturing = nullptr, state().last = captured;
      run_all();
      set_pool(0);
      restore(before);
      now = outer;
    });
    work();
    return std::make_shared<Graph>(captured);
  }
};

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device to) const override { return {kType, std::exchange(device_now, to.index())}; }
  c10::Device getDevice() const override { return {kType, device_now}; }
  void setDevice(c10::Device to) const override { device_now = to.index(); }
  void uncheckedSetDevice(c10::Device to) const noexcept override { device_now = to.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Stream getStream(c10::Device of) const override { return stream(current[index(of)]); }
  c10::Stream getStreamFromGlobalPool(c10::Device of, bool) const override {
    const std::lock_guard lock(state().mutex);
    return stream(static_cast<c10::StreamId>(index(of)) * kNext + 1 + state().next++ % kStreams);
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    return stream(std::exchange(current[index(to.device())], to.id()));
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override { used_on(data, stream.id()); }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    const std::lock_guard lock(state().mutex);
    require_sound_capture();
    if (!*event) *event = new Recorded;
    *static_cast<Recorded*>(*event) = {now_on(stream.id()), capture_number()};
  }
  void block(void* event, const c10::Stream& stream) const override {
    const auto& recorded = *static_cast<Recorded*>(event);
    require_sound_capture();
    TORCH_CHECK(recorded.capture == capture_number(), "fake device: a stream waits for an event of capture ", recorded.capture,
                " in capture ", capture_number(), " (0 is outside of any)");
    append(stream.id(), {.work = {}, .wait = recorded});
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Recorded*>(event); }
  bool queryEvent(void* event) const override {
    const std::lock_guard lock(state().mutex);
    require_no_capture(event);
    return is_over(*static_cast<Recorded*>(event));
  }
  void synchronizeEvent(void* event) const override {
    count_wait("event");
    const std::lock_guard lock(state().mutex);
    require_no_capture(event);
    wait_for(static_cast<Recorded*>(event)->stream, static_cast<Recorded*>(event)->until);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    count_wait("stream");
    const std::lock_guard lock(state().mutex);
    wait_for(stream.id(), state().queues[stream.id()].queued);
  }

 private:
  static size_t index(c10::Device of) { return static_cast<size_t>(of.has_index() ? of.index() : device_now); }
  static c10::Stream stream(c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, static_cast<c10::DeviceIndex>(id / kNext)), id);
  }
  static void require_no_capture(const void* event) {
    TORCH_CHECK(static_cast<const Recorded*>(event)->capture == 0, "fake device: the host asks for an event of a capture");
  }
};

const Guard guard;

std::atomic<int64_t> locked_bytes = 0;

// Plain memory, of which it counts how much was ever asked for.
class PageLocked final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    locked_bytes += static_cast<int64_t>(bytes);
    return c10::GetCPUAllocator()->allocate(bytes);
  }
  c10::DeleterFnPtr raw_deleter() const override { return c10::GetCPUAllocator()->raw_deleter(); }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};

// So that backwards order the streams as they do on any accelerator.
class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  c10::Device getDeviceFromPtr(void* data) const override { return device_of(data); }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &page_locked; }
  bool isPinnedPtr(const void*) const override { return false; }

 private:
  static inline PageLocked page_locked;
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
    for (c10::DeviceIndex index = -1; index < static_cast<c10::DeviceIndex>(kDevices); ++index)
      shardproof::use_device_math({kType, index}, queued_math(index));
    shardproof::use_device_graphs(kType, std::make_shared<Graphs>());
    return true;
  }();
  (void)once;
}

c10::Device device() {
  return {kType, 0};
}

c10::Device second_device() {
  return {kType, 1};
}

int64_t bytes_page_locked() {
  return locked_bytes;
}

c10::DeviceIndex current_device() {
  return device_now;
}

c10::StreamId current_stream() {
  return current[static_cast<size_t>(device_now)];
}

Moment now_on(c10::StreamId stream) {
  const std::lock_guard lock(state().mutex);
  return {stream, state().queues[stream].queued};
}

bool is_over(const Moment& moment) {
  const std::lock_guard lock(state().mutex);
  return state().queues[moment.stream].done >= moment.until;
}

void queue_on(c10::StreamId stream, std::function<void()> work) { append(stream, {.work = std::move(work), .wait = {}}); }

void queue(std::function<void()> work, const std::string& what) {
  require_sound_capture();
  if (captures()) capture(what, work);
  queue_on(current_stream(), std::move(work));
}

// Other devices go on meanwhile.
bool captures() {
  const auto& now = state().capturing;
  return now && state().not_captured == 0 && now->device == device_now;
}

void capture(std::string what, std::function<void()> work) {
  state().capturing->work.push_back(std::move(work));
  state().capturing->launches.push_back(std::move(what));
}

NotCaptured::NotCaptured() { ++state().not_captured; }
NotCaptured::~NotCaptured() { --state().not_captured; }

std::vector<std::string> last_launches() { return state().last ? state().last->launches : std::vector<std::string>{}; }

void synchronize() {
  const std::lock_guard lock(state().mutex);
  wait_for(current_stream(), now_on(current_stream()).until);
}

void count_wait(const std::string& what) {
  if (const auto& now = state().capturing; now && now->device == device_now) {
    now->is_broken = true;
    TORCH_CHECK(false, "fake device: the host waits for the device in ", what, " while its streams are captured");
  }
  const std::lock_guard lock(state().mutex);
  ++state().waits[what];
}

std::map<std::string, int64_t> host_waits() {
  const std::lock_guard lock(state().mutex);
  return state().waits;
}

void schedule_by(std::shared_ptr<shardproof::SchedulePolicy> policy) {
  static std::unique_ptr<Exploration> scheduled;
  const std::lock_guard lock(state().mutex);
  for (const auto& [stream, queue] : state().queues) run(stream, queue.queued);  // what was before
  scheduled =
      policy ? std::make_unique<Exploration>(Exploration{.when = When::between_calls, .policy = std::move(policy)}) : nullptr;
  state().exploration = scheduled.get();
}

Orders every_order(const std::function<bool()>& program, When when, int64_t most) {
  Orders found;
  std::set<std::vector<int64_t>> distinct;
  Exploration exploration{.when = when};
  {
    const std::lock_guard lock(state().mutex);
    for (const auto& [stream, queue] : state().queues) run(stream, queue.queued);  // what was before
  }
  do {
    TORCH_CHECK(found.runs < most, "fake device: the program has more than ", most, " runs; give it fewer steps");
    exploration.taken = 0;
    exploration.streams.clear();
    exploration.order.clear();
    state().exploration = &exploration;
    const std::shared_ptr<void> over(nullptr, [](void*) { state().exploration = nullptr; });
    const bool held = program();
    const std::lock_guard lock(state().mutex);
    for (const c10::StreamId stream : exploration.streams) wait_for(stream, state().queues[stream].queued);
    ++found.runs;
    found.failed += held ? 0 : 1;
    distinct.insert(exploration.order);
  } while (exploration.advance());
  found.distinct = static_cast<int64_t>(distinct.size());
  return found;
}

}  // namespace fake_device
