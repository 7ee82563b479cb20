// Who may run. `parallel`: every rank that is not blocked. `serial`: one rank at a time, drawn by the seed from those that
// could. Both know when no rank can go on.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <vector>

#include "comm/threads/threads_parker.h"

namespace shardproof::threads {

// The splitmix64 generator: the same draws on every platform.
uint64_t next_random(uint64_t& state);

class Scheduler {
 public:
  // The lock of a world. Ranks that were made ready under it are woken once it is released: woken earlier, they would
  // only run into it.
  class Lock {
   public:
    explicit Lock(Scheduler& scheduler) : scheduler_(scheduler) { lock(); }
    ~Lock() {
      if (held_) unlock();
    }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;
    void lock();
    void unlock();

   private:
    Scheduler& scheduler_;
    bool held_ = false;
  };

  // `stuck` is called when unfinished ranks are left and all are blocked; it must make one ready.
  Scheduler(std::vector<Parker*> parkers, bool serial, uint64_t seed, std::function<void()> stuck);

  // Everything below is called under the lock.

  // Lets the ranks begin. Serial: the first one; the others begin when they are first drawn.
  void start();
  // Puts the calling rank to sleep until another thread has called `ready` for it; releases the lock meanwhile.
  void block(Lock& lock, int64_t rank);
  // Ends the block of a rank. No effect on a rank that is not blocked.
  void ready(int64_t rank);
  // Serial: lets the seed choose who goes on, maybe the caller.
  void yield(Lock& lock, int64_t rank);
  void finish(int64_t rank);

  bool all_finished() const { return unfinished_ == 0; }
  bool finished(int64_t rank) const { return states_[rank] == State::finished; }

 private:
  enum class State { runnable, running, blocked, finished };

  void draw_next();
  void sleep(Lock& lock, int64_t rank);

  std::mutex mutex_;
  std::vector<Parker*> parkers_;
  std::vector<Parker*> to_wake_;
  const bool serial_;
  uint64_t random_;
  std::function<void()> stuck_;
  std::vector<State> states_;
  std::vector<int64_t> runnable_;  // serial: those that wait to be drawn
  int64_t running_ = 0;            // parallel: those that are not blocked
  int64_t unfinished_;
};

}  // namespace shardproof::threads
