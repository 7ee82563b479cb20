// Copies between a device and the host's memory that run beside the device's other work.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <deque>
#include <memory>
#include <optional>
#include <vector>

namespace shardproof {

struct HostCopy {
  at::Tensor target, source;
};

// One copy, or several that go together. Empty: nothing is under way.
class HostTransfer {
 public:
  // Returns when the copy is over. Until then the host must neither read nor write its memory.
  void wait() const;
  // Somebody has waited for it, or there was none.
  bool is_over() const;
  // What the current stream is given from now on comes after the copy, and the host goes on. The transfer lets go of the
  // device's memory, and of the host's when the copy is over. On the CPU it is `wait`.
  void order() const;

 private:
  friend class HostTransfers;
  struct Flight;
  std::shared_ptr<Flight> flight_;
};

// Of one rank, used by one thread at a time. On the CPU a copy is over when the call returns. On a device without memory there
// is nothing to copy.
class HostTransfers {
 public:
  // So many downloads keep device memory alive; another one waits for the oldest.
  static constexpr size_t kDownloadsMax = 2;

  explicit HostTransfers(c10::Device device) : device_(device) {}

  // From the device to the host, on a stream of its own, behind what the current stream has queued. `source` lives until the
  // copy is over, and nobody writes it.
  HostTransfer download(const at::Tensor& target, at::Tensor source);
  // The same of several tensors. The caller sees to it that not too many are under way.
  HostTransfer download_all(std::vector<HostCopy> copies);
  // From the host to the device, on the current stream.
  HostTransfer upload(const at::Tensor& target, const at::Tensor& source);
  // From the host to the device, on a stream of its own, behind what the current stream has queued: what freed the memory that
  // `target` has now, and the `order` of the download that wrote `source`.
  HostTransfer upload_ahead(const at::Tensor& target, const at::Tensor& source);

 private:
  c10::Stream after_current(std::optional<c10::Stream>& stream) const;
  HostTransfer copy(std::vector<HostCopy> copies, std::optional<c10::Stream>& stream) const;

  const c10::Device device_;
  std::optional<c10::Stream> stream_;  // of downloads
  std::optional<c10::Stream> ahead_;   // of uploads
  std::deque<HostTransfer> downloads_;
};

}  // namespace shardproof
