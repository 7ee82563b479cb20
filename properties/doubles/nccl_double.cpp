// Streams, events, memory, and the store of the double.
#include "properties/doubles/nccl_double.h"

#include <fmt/format.h>

#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "properties/doubles/nccl_double_streams.h"
#include "shardproof/base/dtypes.h"
#include "shardproof/device/device.h"
#include "shardproof/device/device_graph.h"
#include "shardproof/device/kernels/cuda.h"

namespace nccl_double {
namespace {

StreamQueue& stream_of(NcclApi::Stream stream) {
  return *static_cast<StreamQueue*>(stream);
}
EventBox& box_of(NcclApi::Event event) {
  return *static_cast<EventBox*>(event);
}

std::shared_ptr<Moment> moment_of(NcclApi::Event event) {
  EventBox& box = box_of(event);
  const std::lock_guard lock(box.mutex);
  return box.moment;
}

}  // namespace

Api::Api(std::shared_ptr<Cluster> cluster, int64_t rank)
    : cluster_(std::move(cluster)), rank_(rank), progress_(std::make_unique<StreamQueue>()) {
  current_ = first_ = make_stream();
}

Api::~Api() {
  progress_.reset();
  delete static_cast<StreamQueue*>(first_);
}

void Api::run_on(NcclApi::Stream stream, std::function<void()> kernel) {
  stream_of(stream).work(std::move(kernel));
}

void Api::synchronize(NcclApi::Stream stream) {
  const auto here = std::make_shared<Moment>();
  stream_of(stream).push([here] { here->pass(); });
  if (!here->wait_for(kForEver)) throw std::logic_error("the host waits for ever for a stream");
}

void Api::synchronize() {
  std::set<NcclApi::Stream> streams;
  {
    const std::lock_guard lock(mutex_);
    streams = streams_;
  }
  for (const NcclApi::Stream stream : streams) synchronize(stream);
}

void Api::set_current_stream(NcclApi::Stream stream) {
  current_ = stream;
}

NcclApi::Stream Api::make_stream() {
  const std::lock_guard lock(mutex_);
  return *streams_.insert(new StreamQueue).first;
}

void Api::destroy_stream(NcclApi::Stream stream) {
  {
    const std::lock_guard lock(mutex_);
    if (streams_.erase(stream) == 0) throw std::logic_error("a stream was destroyed that there is not");
  }
  delete static_cast<StreamQueue*>(stream);
}

NcclApi::Stream Api::current_stream() {
  return current_;
}

NcclApi::Event Api::make_event() {
  const std::lock_guard lock(mutex_);
  return *events_.insert(new EventBox).first;
}

void Api::destroy_event(Event event) {
  {
    const std::lock_guard lock(mutex_);
    if (events_.erase(event) == 0) throw std::logic_error("an event was destroyed that there is not");
  }
  delete static_cast<EventBox*>(event);
}

void Api::record(Event event, NcclApi::Stream stream) {
  const auto moment = std::make_shared<Moment>(shardproof::is_capturing());
  {
    EventBox& box = box_of(event);
    const std::lock_guard lock(box.mutex);
    box.moment = moment;
  }
  stream_of(stream).push([moment] { moment->pass(); });
}

// As in CUDA an event that was never recorded is over, and those of captures and others do not wait for each other.
void Api::wait(NcclApi::Stream stream, Event event) {
  const auto moment = moment_of(event);
  if (!moment) return;
  if (moment->is_captured != shardproof::is_capturing())
    throw std::logic_error(moment->is_captured ? "a stream waits for an event of a capture that is over"
                                               : "a capture waits for an event from before it");
  stream_of(stream).push([moment] { moment->wait(); });
}

bool Api::is_complete(Event event) {
  const auto moment = moment_of(event);
  std::this_thread::sleep_for(std::chrono::microseconds(cluster_->plan.look_us));
  return !moment || moment->is_over();
}

// As CUDA may, it lets the host wait where memory of the host is not pinned.
void Api::copy(void* target, const void* source, int64_t bytes, NcclApi::Stream stream) {
  run_on(stream, [=] { std::memcpy(target, source, static_cast<size_t>(bytes)); });
  if (!is_of_copies(target) || !is_of_copies(source)) synchronize(stream);
}

bool Api::is_of_copies(const void* memory) const {
  if (!cluster_->plan.host_tensors) return true;  // all memory counts as the device's
  const std::lock_guard lock(mutex_);
  const auto after = memory_.upper_bound(const_cast<void*>(memory));
  if (after == memory_.begin()) return false;
  const auto& [begin, block] = *std::prev(after);
  return memory < static_cast<const std::byte*>(begin) + block.bytes;
}

void Api::reduce(at::ScalarType dtype, Reduce op, const std::vector<const std::byte*>& terms, int64_t count, std::byte* target,
                 NcclApi::Stream stream) {
  run_on(stream, [=] { shardproof::device_math(at::kCPU).reduce(shardproof::element_type(dtype), op, terms, count, target); });
}

void* Api::allocate(int64_t bytes, Memory kind) {
  void* const memory = std::aligned_alloc(256, static_cast<size_t>((bytes + 255) / 256 * 256));
  std::memset(memory, 0x7f, static_cast<size_t>(bytes));
  const std::lock_guard lock(mutex_);
  memory_[memory] = {kind, bytes};
  return memory;
}

int64_t Api::pieces_of_memory() {
  const std::lock_guard lock(mutex_);
  return static_cast<int64_t>(memory_.size());
}

// As ncclMemFree does, and unlike cudaFree, it waits for nobody.
void Api::release(void* memory, Memory kind) {
  {
    const std::lock_guard lock(mutex_);
    if (kind == Memory::registered || kind == Memory::symmetric)
      for (const NcclApi::Stream stream : streams_)
        if (!stream_of(stream).is_idle()) throw std::logic_error("memory was released that a stream may still use");
    const auto found = memory_.find(memory);
    if (registered_.count(memory) > 0) throw std::logic_error("memory was released that is still registered");
    if (found == memory_.end() || found->second.kind != kind)
      throw std::logic_error("memory was released that is not there, or in another way than it was allocated");
    memory_.erase(found);
  }
  std::free(memory);
}

void MemoryStore::set(const std::string& name, const std::string& text) {
  const std::lock_guard lock(mutex_);
  texts_[name] = text;
}

std::optional<std::string> MemoryStore::get(const std::string& name) {
  const std::lock_guard lock(mutex_);
  const auto found = texts_.find(name);
  return found == texts_.end() ? std::nullopt : std::optional(found->second);
}

int64_t MemoryStore::count(const std::string& name) {
  const std::lock_guard lock(mutex_);
  return ++counts_[name];
}

void MemoryStore::erase(const std::string& name) {
  const std::lock_guard lock(mutex_);
  texts_.erase(name);
}

size_t MemoryStore::size() const {
  const std::lock_guard lock(mutex_);
  return texts_.size();
}

}  // namespace nccl_double
