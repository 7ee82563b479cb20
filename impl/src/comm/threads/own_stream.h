// The stream that a rank-thread has on a device.
#pragma once

#include <c10/core/AutogradState.h>

#include "internal/device/streams.h"

namespace shardproof::threads {

// While it lives, the device and a stream of the rank's own are current, and backward passes stay on the rank's thread.
// LibTorch has one thread for each device for backward passes, where one rank that waits would stop all ranks. The stream comes
// behind `given`: what the caller of the ranks has given its own.
class OwnStream {
 public:
  OwnStream(std::optional<c10::Device> device, std::optional<c10::Event>& given) : device_(device) {
    if (!device_ || device_->is_cpu()) return;
    const c10::impl::VirtualGuardImpl guard(device_->type());
    device_before_ = guard.exchangeDevice(*device_);
    stream_before_ = guard.exchangeStream(guard.getStreamFromGlobalPool(*device_));
    given->block(current_stream(*device_));
    multithreaded_ = c10::AutogradState::get_tls_state().get_multithreading_enabled();
    c10::AutogradState::get_tls_state().set_multithreading_enabled(false);
  }
  ~OwnStream() {
    if (!stream_before_) return;
    const c10::impl::VirtualGuardImpl guard(device_->type());
    guard.synchronizeStream(guard.exchangeStream(*stream_before_));
    guard.exchangeDevice(*device_before_);
    c10::AutogradState::get_tls_state().set_multithreading_enabled(multithreaded_);
  }
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;

 private:
  std::optional<c10::Device> device_, device_before_;
  std::optional<c10::Stream> stream_before_;
  bool multithreaded_ = true;
};

}  // namespace shardproof::threads
