#include "internal/device/host_transfers.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>

#include <limits>

#include "shardproof/base/host_work.h"
#include "internal/device/streams.h"

namespace shardproof {

// Both ends live as long as the copy, however it is let go of.
struct HostTransfer::Flight {
  Flight(std::vector<HostCopy> given, c10::Stream stream) : copies(std::move(given)), device(stream.device()) {
    done.emplace(stream.device_type());
    done->record(stream);
  }
  // On the CPU, where a test decides when copies happen. Until then the target is garbage.
  Flight(std::vector<HostCopy> given, HostWork& decides) : copies(std::move(given)) {
    for (const HostCopy& each : copies)
      if (each.target.is_floating_point()) each.target.fill_(std::numeric_limits<double>::quiet_NaN());
      else if (each.target.scalar_type() == at::kByte) each.target.fill_(0xff);
    job = decides.later([this] {
      for (const HostCopy& each : copies) at::Tensor(each.target).copy_(each.source);
    });
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
    if (copies.empty()) return;
    job ? job->wait() : done->synchronize();
    copies.clear();
  }

  void order() {
    if (copies.empty()) return;
    if (job) return wait();
    done->block(current_stream(device));
    for (HostCopy& each : copies) {
      at::Tensor& of_device = each.target.is_cpu() ? each.source : each.target;
      if (of_device.defined()) use_here(of_device.storage().data_ptr());
      of_device.reset();
    }
  }

  std::vector<HostCopy> copies;
  const c10::Device device = at::kCPU;
  std::optional<c10::Event> done;
  std::unique_ptr<HostJob> job;
};

void HostTransfer::wait() const {
  if (flight_) flight_->wait();
}

bool HostTransfer::is_over() const { return !flight_ || flight_->copies.empty(); }

void HostTransfer::order() const {
  if (flight_) flight_->order();
}

c10::Stream HostTransfers::after_current(std::optional<c10::Stream>& stream) const {
  if (!stream) stream = c10::impl::VirtualGuardImpl(device_.type()).getStreamFromGlobalPool(device_);
  order_streams(current_stream(device_), *stream);
  return *stream;
}

HostTransfer HostTransfers::copy(std::vector<HostCopy> copies, std::optional<c10::Stream>& stream) const {
  HostTransfer transfer;
  if (device_.is_meta()) return transfer;
  HostWork* const decides = HostWork::of_this_thread();
  if (device_.is_cpu() && !decides) {
    for (const HostCopy& each : copies) each.target.copy_(each.source);
    return transfer;
  }
  if (device_.is_cpu()) {
    transfer.flight_ = std::make_shared<HostTransfer::Flight>(std::move(copies), *decides);
    return transfer;
  }
  const c10::Stream own = after_current(stream);
  const c10::StreamGuard on_stream(own);
  for (const HostCopy& each : copies) each.target.copy_(each.source, /*non_blocking=*/true);
  transfer.flight_ = std::make_shared<HostTransfer::Flight>(std::move(copies), own);
  return transfer;
}

HostTransfer HostTransfers::download(const at::Tensor& target, at::Tensor source) {
  while (downloads_.size() >= kDownloadsMax) {
    downloads_.front().wait();
    downloads_.pop_front();
  }
  HostTransfer transfer = download_all({{target, std::move(source)}});
  if (transfer.flight_) downloads_.push_back(transfer);
  return transfer;
}

HostTransfer HostTransfers::download_all(std::vector<HostCopy> copies) { return copy(std::move(copies), stream_); }

HostTransfer HostTransfers::upload(const at::Tensor& target, const at::Tensor& source) {
  HostTransfer transfer;
  target.copy_(source, /*non_blocking=*/true);
  if (device_.is_cpu()) return transfer;
  transfer.flight_ = std::make_shared<HostTransfer::Flight>(std::vector<HostCopy>{{target, source}}, current_stream(device_));
  return transfer;
}

HostTransfer HostTransfers::upload_ahead(const at::Tensor& target, const at::Tensor& source) {
  return copy({{target, source}}, ahead_);
}

}  // namespace shardproof
