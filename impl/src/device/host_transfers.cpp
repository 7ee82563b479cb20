#include "testing/device/host_transfers.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace shardproof {

// Both ends live as long as the copy, however it is let go of.
struct HostTransfer::Flight {
  Flight(at::Tensor to, at::Tensor from, c10::Stream stream)
      : target(std::move(to)), source(std::move(from)), done(stream.device_type()) {
    done.record(stream);
  }
  ~Flight() {
    try {
      wait();
    } catch (const c10::Error&) {  // the device failed, which its next call reports
    }
  }
  Flight(const Flight&) = delete;
  Flight& operator=(const Flight&) = delete;

  void wait() {
    if (!source.defined()) return;
    done.synchronize();
    target.reset();
    source.reset();
  }

  at::Tensor target, source;
  c10::Event done;
};

void HostTransfer::wait() const {
  if (flight_) flight_->wait();
}

HostTransfer HostTransfers::download(const at::Tensor& target, at::Tensor source) {
  HostTransfer transfer;
  if (device_.is_cpu()) {
    target.copy_(source);
    return transfer;
  }
  while (downloads_.size() >= kDownloadsMax) {
    downloads_.front().wait();
    downloads_.pop_front();
  }
  const c10::impl::VirtualGuardImpl guard(device_.type());
  if (!stream_) stream_ = guard.getStreamFromGlobalPool(device_);
  c10::Event ready(device_.type());
  ready.record(guard.getStream(device_));
  ready.block(*stream_);
  const c10::StreamGuard on_stream(*stream_);
  target.copy_(source, /*non_blocking=*/true);
  transfer.flight_ = std::make_shared<HostTransfer::Flight>(target, std::move(source), *stream_);
  downloads_.push_back(transfer);
  return transfer;
}

HostTransfer HostTransfers::upload(const at::Tensor& target, const at::Tensor& source) {
  HostTransfer transfer;
  target.copy_(source, /*non_blocking=*/true);
  if (device_.is_cpu()) return transfer;
  const c10::impl::VirtualGuardImpl guard(device_.type());
  transfer.flight_ = std::make_shared<HostTransfer::Flight>(target, source, guard.getStream(device_));
  return transfer;
}

}  // namespace shardproof
