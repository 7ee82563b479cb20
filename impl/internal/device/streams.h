// Streams of a device, and which waits for which. On a CPU there is one, and nothing here does anything.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>

namespace shardproof {

// This thread's.
inline c10::Stream current_stream(c10::Device device) {
  return device.is_cpu() ? c10::Stream(c10::Stream::DEFAULT, device)
                         : c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// What `second` is given from now on comes after what `first` has been given.
inline void order_streams(c10::Stream first, c10::Stream second) {
  if (first == second) return;
  c10::Event event(first.device_type());
  event.record(first);
  event.block(second);
}

// Memory goes back to the stream that it was allocated on, which may use it again before others are done with it. This is used
// again only after what the current stream has been given by the time when it is freed.
inline void use_here(const c10::DataPtr& memory) {
  if (memory.device().is_cpu()) return;
  c10::impl::VirtualGuardImpl(memory.device().type()).recordDataPtrOnStream(memory, current_stream(memory.device()));
}

// While it lives this thread's work comes on the stream: behind what the thread's own stream was given before, and before what
// that is given afterwards. Memory goes back to the stream that it was allocated on, so who works with it works there.
class OnStream {
 public:
  explicit OnStream(c10::Stream stream) : before_(current_stream(stream.device())), stream_(stream) {
    if (before_ == stream_) return;
    order_streams(before_, stream_);
    c10::impl::VirtualGuardImpl(stream.device_type()).exchangeStream(stream);
  }
  ~OnStream() {
    if (before_ == stream_) return;
    c10::impl::VirtualGuardImpl(stream_.device_type()).exchangeStream(before_);
    try {
      order_streams(stream_, before_);
    } catch (const c10::Error&) {  // the device failed, which its next call reports
    }
  }
  OnStream(const OnStream&) = delete;
  OnStream& operator=(const OnStream&) = delete;

 private:
  const c10::Stream before_, stream_;
};

}  // namespace shardproof
