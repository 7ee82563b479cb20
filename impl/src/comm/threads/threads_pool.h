// Threads that are kept between worlds: starting one costs tens of microseconds, and LibTorch's thread-local caches stay
// warm. Never destroyed, so that nothing depends on the order of exit.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

#include "comm/threads/threads_parker.h"

namespace shardproof::threads {

class PoolThread {
 public:
  // What the thread runs once its parker is released; the thread must be idle.
  void assign(std::function<void()> job) { job_ = std::move(job); }
  Parker& parker() { return parker_; }

 private:
  friend class Pool;
  void loop();

  Parker parker_;
  std::function<void()> job_;
};

class Pool {
 public:
  static Pool& instance();

  // Threads that nobody else has until they are released. Throws Error, and takes none, when the system refuses one.
  std::vector<PoolThread*> acquire(int64_t count);
  // Their jobs must have ended, save for returning.
  void release(const std::vector<PoolThread*>& threads);

 private:
  static PoolThread* start_thread();

  std::mutex mutex_;
  std::vector<PoolThread*> idle_;
};

}  // namespace shardproof::threads
