// A rank in a communicator of the double of NCCL.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
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
  std::set<std::string> algorithms;    // that it has called
  std::set<int64_t> sends_to, takes_from;  // where it is connected
  std::chrono::microseconds late{0};       // it comes about so long after all ranks are here
  std::optional<std::chrono::steady_clock::time_point> there;

  bool is_there() {
    if (clique->joined < clique->size) return false;
    if (!there) there = std::chrono::steady_clock::now() + late;
    return std::chrono::steady_clock::now() >= *there;
  }
  // On a stream's thread: until the condition holds. False when it was aborted meanwhile.
  template <class Condition>
  bool wait(std::unique_lock<std::mutex>& lock, Condition condition) {
    clique->changed.wait(lock, [&] { return aborted || (clique->error.empty() && condition()); });
    return !aborted;
  }
  // On the progress' thread, as what follows: until all ranks have called the algorithm.
  void connect(const std::string& algorithm) {
    std::unique_lock lock(clique->mutex);
    ++clique->called[algorithm];
    clique->changed.notify_all();
    wait(lock, [&] { return clique->called[algorithm] >= clique->size; });
  }
  // As ncclTransportP2pSetup does: one distance after the other, and once more when all are connected. With the rank that is as
  // far in both directions it exchanges one message, which both take for as long as their own.
  void connect(const std::set<int64_t>& to, const std::set<int64_t>& from) {
    std::unique_lock lock(clique->mutex);
    const int64_t size = clique->size;
    for (int64_t step = 1; step < 2 * size; ++step) {
      const int64_t target = (rank + step) % size, source = (rank + 2 * size - step) % size;
      const bool sends = to.count(target) > 0, takes = from.count(source) > 0;
      const auto tell = [&](int64_t peer) {
        clique->setups[{step, rank, peer}].push_back({sends, takes});
        clique->changed.notify_all();
      };
      const auto hear = [&](int64_t peer) {
        auto& told = clique->setups[{step, peer, rank}];
        if (!wait(lock, [&] { return !told.empty(); })) return false;
        const auto [peer_sends, peer_takes] = told.front();
        told.pop_front();
        if (target == source && (peer_sends != takes || peer_takes != sends)) {
          clique->error = "Message truncated";
          clique->changed.notify_all();
        }
        return true;
      };
      if (takes) tell(source);
      if (sends && !(takes && target == source)) tell(target);
      if (sends && !hear(target)) return;
      if (takes && !(sends && target == source) && !hear(source)) return;
    }
  }
  void hang() {
    std::unique_lock lock(clique->mutex);
    clique->changed.wait(lock, [this] { return aborted.load(); });
  }
};

}  // namespace nccl_double
