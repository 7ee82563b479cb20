// A device without memory: a rank of a large model runs its step on it in milliseconds, and what it would hold and compute is
// counted. LibTorch has such a device, `meta`; here its tensors also have addresses, which nobody may follow, so that the
// library's checks of overlaps hold there as elsewhere.
#pragma once

#include <cstdint>
#include <memory>

#include "harness/plan/step_record.h"

namespace harness {

// While it lives, this thread's operators on meta tensors are written into the recorder, those that LibTorch has not for meta
// tensors are there, and memory of that device is counted. One at a time in a process.
class MetaDevice {
 public:
  explicit MetaDevice(StepRecorder& recorder);
  ~MetaDevice();
  MetaDevice(const MetaDevice&) = delete;

  // Of all tensors of the device: what the library's ledger counts, and activations, gradients on their way, and so on.
  int64_t bytes() const;
  int64_t peak_bytes() const;
  void reset_peak();

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

}  // namespace harness
