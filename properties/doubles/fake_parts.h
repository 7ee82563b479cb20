// The parts of the fake device: its memory and its operators.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <array>
#include <cstddef>
#include <functional>
#include <string>
#include <vector>

namespace fake_device {

// As a caching allocator's: what is freed is used again only by the stream that it was allocated on, and new memory is full of
// NaN, from when the stream gets there.
c10::Allocator& memory();
constexpr size_t kDevices = 2;
c10::DeviceIndex current_device();
c10::StreamId current_stream();  // of the current device
c10::Device device_of(const void* device_memory);
// The memory is not used again before what the stream has been given by the time when it is freed.
void used_on(const c10::DataPtr& memory, c10::StreamId stream);

// What a stream has been given so far, and whether that is over.
struct Moment {
  c10::StreamId stream = 0;
  int64_t until = 0;
};
Moment now_on(c10::StreamId stream);
bool is_over(const Moment& moment);
void queue_on(c10::StreamId stream, std::function<void()> work);

// Adds one to what `host_waits` says.
void count_wait(const std::string& what);

// What a graph has of memory. Whoever allocates while a pool is set gets memory of that pool, and nobody else ever does.
void set_pool(int64_t pool);  // 0: none
using Contents = std::array<std::vector<std::byte>, kDevices>;
Contents contents();
// Puts it back; what was allocated since gets NaN.
void restore(const Contents& contents);
// Counted from the beginning of the pool where the address lies there.
std::string address_text(const void* device_memory);

// Whether a graph is being captured, and what its replays do.
bool captures();
void capture(std::string what, std::function<void()> work);
// While it lives, work that streams are given is not captured: `capture` is told what a replay does instead.
class NotCaptured {
 public:
  NotCaptured();
  ~NotCaptured();
};

// Every operator that has a kernel for the CPU.
void register_operators();

}  // namespace fake_device
