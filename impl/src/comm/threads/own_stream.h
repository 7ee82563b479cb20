// The stream that a rank-thread has on a device.
#pragma once

#include <c10/core/AutogradState.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <optional>

namespace shardproof::threads {

// While it lives, the device and a stream of the rank's own are current, and backward passes stay on the rank's thread.
// LibTorch has one thread for each device for backward passes, where one rank that waits would stop all ranks.
class OwnStream {
 public:
  explicit OwnStream(std::optional<c10::Device> device) : device_(device) {
    if (!device_ || device_->is_cpu()) return;
    const c10::impl::VirtualGuardImpl guard(device_->type());
    device_before_ = guard.exchangeDevice(*device_);
    stream_before_ = guard.exchangeStream(guard.getStreamFromGlobalPool(*device_));
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
