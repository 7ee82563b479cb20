// Checks whose answers stay on the device until somebody needs them, so that no host waits for it in a backward.
//
// Each part of a bucket that may be bad has a slot there: the least number that stands for a bad place. Numbers are ordered by
// rank, reduction and place, so that ranks agree by taking the least of each slot, and all of them throw the same error.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <limits>
#include <memory>
#include <vector>

#include "shardproof/comm/comm.h"
#include "internal/device/host_transfers.h"

namespace shardproof {

class LateChecks {
 public:
  static constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

  struct Bad {
    int64_t rank = 0, reduction = 0;  // of the step
    int64_t place = 0;
  };
  using Throw = std::function<void(const Bad&)>;

  LateChecks(c10::Device device, int64_t rank, std::shared_ptr<HostTransfers> transfers);

  // A slot. Its error is thrown by whoever reads the answers. Before `begin`.
  size_t add(Throw error);
  // Gives the slots their memory, where the host would wait for the device.
  void begin();

  // Asks, behind what the current stream was given, for the first of the values beyond the limit. Its place counts from
  // `offset`.
  void ask(size_t slot, const at::Tensor& values, double limit, int64_t offset, int64_t reduction);
  // All ranks ask from now on, or a replayed graph has asked: the next reader has answers to wait for.
  void expect() { is_expected_ = slots_.defined(); }
  // Answers so far are not wanted: what they are about was dropped.
  void forget();

  // What else the host wants to know, int64 or double, in its memory: one copy brings it and all answers, and the host waits
  // once. Throws the error of the least bad place. With `world` this is collective: all ranks throw if one does, and do so
  // again until they forget. Without it this rank sees its own answers alone.
  std::vector<at::Tensor> read(Comm* world, std::vector<at::Tensor> wanted = {});

 private:
  void copy_to_host(std::vector<at::Tensor>& tensors);
  void throw_least(const at::Tensor& answers) const;

  const c10::Device device_;
  const int64_t rank_;
  const std::shared_ptr<HostTransfers> transfers_;
  std::vector<Throw> errors_;  // by slot
  at::Tensor slots_;           // undefined on the CPU, where nobody asks
  at::Tensor host_;            // what copies go through
  bool is_expected_ = false;   // since ranks agreed, or forgot; the same on all ranks
};

}  // namespace shardproof
