// Who may run. `parallel`: every rank that is not blocked. `serial`: one rank at a time, drawn by the seed from those that
// could, or chosen by a policy. All know when no rank can go on.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "comm/threads/threads_parker.h"
#include "shardproof/comm/threads/schedule_policy.h"

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

  // `caller` is woken when all have finished. `stuck` is called when unfinished ranks are left and all are blocked; it must
  // make one ready.
  Scheduler(std::vector<Parker*> parkers, Parker* caller, bool serial, uint64_t seed,
            std::shared_ptr<SchedulePolicy> policy, std::function<void()> stuck);

  // Everything below is called under the lock.

  // Lets the ranks begin. Serial: the first one; the others begin when they are first drawn.
  void start();
  // Puts the calling rank to sleep until another thread has called `ready` for it; releases the lock meanwhile.
  void block(Lock& lock, int64_t rank);
  // Ends the block of a rank. No effect on a rank that is not blocked.
  void ready(int64_t rank);
  // Serial: lets the seed or the policy choose who goes on, maybe the caller.
  void yield(Lock& lock, int64_t rank);
  void finish(int64_t rank);

  // With a policy. A thread beside the ranks, which begins when it is first chosen; the methods above take what this returns in
  // the place of a rank.
  int64_t add_thread(Parker* parker, const SchedulePolicy::Actor& actor, std::function<bool()> awaited);
  // With a policy. What happens, under the lock, when it is chosen. `awaited` says whether a thread is blocked until then.
  struct Event {
    SchedulePolicy::Actor actor;
    std::function<void()> happen;
    std::function<bool()> awaited;
  };
  void add_event(Event event) { events_.push_back(std::move(event)); }

  bool finished(int64_t rank) const { return states_[rank] == State::finished; }

 private:
  enum class State { runnable, running, blocked, finished };

  void draw_next(int64_t yielding = -1);
  void choose_next(int64_t yielding);
  void run_next(size_t drawn);
  void sleep(Lock& lock, int64_t rank);

  std::mutex mutex_;
  std::vector<Parker*> parkers_;
  Parker* const caller_;
  std::vector<Parker*> to_wake_;
  const bool serial_;
  uint64_t random_;
  const std::shared_ptr<SchedulePolicy> policy_;
  std::vector<SchedulePolicy::Actor> actors_;   // by rank, then those of threads beside the ranks
  std::vector<std::function<bool()>> awaited_;  // the same; nobody waits for a rank
  std::vector<Event> events_;
  std::function<void()> stuck_;
  std::vector<State> states_;
  std::vector<int64_t> runnable_;  // serial: those that wait to be drawn
  int64_t running_ = 0;            // parallel: those that are not blocked
  int64_t unfinished_;
};

}  // namespace shardproof::threads
