#include "testing/device/host_transfers.h"

#include <ATen/ATen.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <limits>

#include "shardproof/base/host_work.h"

namespace shardproof {

// Both ends live as long as the copy, however it is let go of.
struct HostTransfer::Flight {
  Flight(at::Tensor to, at::Tensor from, c10::Stream stream) : target(std::move(to)), source(std::move(from)) {
    done.emplace(stream.device_type());
    done->record(stream);
  }
  // On the CPU, where a test decides when copies happen. Until then the target is garbage.
  Flight(at::Tensor to, at::Tensor from, HostWork& decides) : target(std::move(to)), source(std::move(from)) {
    if (target.is_floating_point()) target.fill_(std::numeric_limits<double>::quiet_NaN());
    copy = decides.later([this] { target.copy_(source); });
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
    copy ? copy->wait() : done->synchronize();
    target.reset();
    source.reset();
  }

  at::Tensor target, source;
  std::optional<c10::Event> done;
  std::unique_ptr<HostJob> copy;
};

void HostTransfer::wait() const {
  if (flight_) flight_->wait();
}

HostTransfer HostTransfers::download(const at::Tensor& target, at::Tensor source) {
  HostTransfer transfer;
  HostWork* const decides = HostWork::of_this_thread();
  if (device_.is_cpu() && !decides) {
    target.copy_(source);
    return transfer;
  }
  while (downloads_.size() >= kDownloadsMax) {
    downloads_.front().wait();
    downloads_.pop_front();
  }
  if (device_.is_cpu()) {
    transfer.flight_ = std::make_shared<HostTransfer::Flight>(target, std::move(source), *decides);
    downloads_.push_back(transfer);
    return transfer;
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
