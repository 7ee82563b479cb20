// A rank in a communicator of the double of NCCL.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>

#include "properties/doubles/nccl_double.h"

namespace nccl_double {

inline const std::string kNoWindow = "no window";

// Tasks on streams keep it: a communicator may be aborted while they wait.
struct Api::Member {
  std::shared_ptr<Clique> clique;
  int64_t rank = 0;
  int64_t collectives = 0, splits = 0;
  std::atomic<bool> aborted{false};
  std::string refused;              // by this call, in words; under the clique's lock
  std::atomic<bool> failed{false};  // on demand
  // A split on its way.
  Communicator* child = nullptr;
  int64_t split_number = -1;
  // A window on its way.
  void** window_handle = nullptr;
  void* window_memory = nullptr;
  int64_t windows = 0;
  std::atomic<int64_t> not_queued{0};  // calls that its stream does not have yet
  bool is_connected = false;           // once it has called

  bool is_there() const { return clique->joined == clique->size; }
  // On a stream's thread: until the condition holds. False when it was aborted meanwhile.
  template <class Condition>
  bool wait(std::unique_lock<std::mutex>& lock, Condition condition) {
    clique->changed.wait(lock, [&] { return aborted || (clique->error.empty() && condition()); });
    return !aborted;
  }
  void hang() {
    std::unique_lock lock(clique->mutex);
    clique->changed.wait(lock, [this] { return aborted.load(); });
  }
};

}  // namespace nccl_double
