#include "comm/threads/threads_scheduler.h"

#include <algorithm>
#include <numeric>
#include <thread>

#include "shardproof/base/check.h"

namespace shardproof::threads {

namespace {

// For some tens of microseconds.
constexpr int64_t kLooks = 1000;

}  // namespace

uint64_t next_random(uint64_t& state) {
  uint64_t z = (state += 0x9e3779b97f4a7c15);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

void Scheduler::Lock::lock() {
  scheduler_.mutex_.lock();
  held_ = true;
}

void Scheduler::Lock::unlock() {
  std::vector<Parker*> to_wake;
  to_wake.swap(scheduler_.to_wake_);
  held_ = false;
  scheduler_.mutex_.unlock();
  for (Parker* parker : to_wake) parker->unpark();
}

Scheduler::Scheduler(std::vector<Parker*> parkers, Parker* caller, bool serial, uint64_t seed,
                     std::shared_ptr<SchedulePolicy> policy, std::function<void()> stuck)
    : parkers_(std::move(parkers)),
      caller_(caller),
      serial_(serial),
      random_(seed),
      policy_(std::move(policy)),
      stuck_(std::move(stuck)),
      states_(parkers_.size(), serial ? State::runnable : State::running),
      unfinished_(static_cast<int64_t>(parkers_.size())) {
  for (int64_t rank = 0; policy_ && rank < unfinished_; ++rank) {
    actors_.push_back({.rank = rank});
    awaited_.push_back([] { return false; });
  }
  if (serial_) {
    runnable_.resize(parkers_.size());
    std::iota(runnable_.begin(), runnable_.end(), 0);
  } else {
    running_ = unfinished_;
  }
}

void Scheduler::start() {
  if (serial_)
    draw_next();
  else
    to_wake_ = parkers_;
}

void Scheduler::draw_next(int64_t yielding) {
  if (policy_) return choose_next(yielding);
  if (runnable_.empty() && unfinished_ > 0) stuck_();
  if (runnable_.empty()) return;
  run_next(next_random(random_) % runnable_.size());
}

// Events happen until a thread is chosen.
void Scheduler::choose_next(int64_t yielding) {
  while (true) {
    if (unfinished_ == 0) return;
    if (runnable_.empty() && events_.empty()) stuck_();
    std::ranges::sort(runnable_, {}, [&](int64_t rank) { return actors_[rank]; });
    std::ranges::sort(events_, {}, &Event::actor);
    std::vector<SchedulePolicy::Choice> choices;
    int64_t running = -1;
    for (const int64_t rank : runnable_) {  // the kinds of threads come before those of events
      if (rank == yielding) running = std::ssize(choices);
      choices.push_back({.actor = actors_[rank], .awaited = awaited_[rank]()});
    }
    for (const Event& event : events_) choices.push_back({.actor = event.actor, .awaited = event.awaited()});
    const size_t chosen = policy_->choose(choices, running);
    SHARD_REQUIRE(chosen < choices.size(), "threads", "the policy chose number {} of {}", chosen, choices.size());
    if (chosen < runnable_.size()) return run_next(chosen);
    const auto event = events_.begin() + static_cast<int64_t>(chosen - runnable_.size());
    const std::function<void()> happen = std::move(event->happen);
    events_.erase(event);
    happen();
  }
}

void Scheduler::run_next(size_t drawn) {
  const int64_t rank = runnable_[drawn];
  runnable_[drawn] = runnable_.back();
  runnable_.pop_back();
  states_[rank] = State::running;
  to_wake_.push_back(parkers_[rank]);
}

// Where fewer ranks of this world run than there are cores, one is left to this rank, which looks for its permit there: what
// it waits for often comes sooner than a sleeping thread wakes.
void Scheduler::sleep(Lock& lock, int64_t rank) {
  static const int64_t cores = std::thread::hardware_concurrency();
  const bool has_core = !serial_ && running_ < cores;
  lock.unlock();
  parkers_[rank]->park(has_core ? kLooks : 0);
  lock.lock();
}

void Scheduler::block(Lock& lock, int64_t rank) {
  states_[rank] = State::blocked;
  if (serial_)
    draw_next();
  else if (--running_ == 0)
    stuck_();
  sleep(lock, rank);
}

void Scheduler::ready(int64_t rank) {
  if (states_[rank] != State::blocked) return;
  if (serial_) {
    states_[rank] = State::runnable;
    runnable_.push_back(rank);
  } else {
    states_[rank] = State::running;
    ++running_;
    to_wake_.push_back(parkers_[rank]);
  }
}

void Scheduler::yield(Lock& lock, int64_t rank) {
  if (!serial_ || (runnable_.empty() && events_.empty())) return;
  states_[rank] = State::runnable;
  runnable_.push_back(rank);
  draw_next(rank);
  sleep(lock, rank);
}

int64_t Scheduler::add_thread(Parker* parker, const SchedulePolicy::Actor& actor, std::function<bool()> awaited) {
  const int64_t thread = std::ssize(states_);
  parkers_.push_back(parker);
  actors_.push_back(actor);
  awaited_.push_back(std::move(awaited));
  states_.push_back(State::runnable);
  runnable_.push_back(thread);
  ++unfinished_;
  return thread;
}

void Scheduler::finish(int64_t rank) {
  states_[rank] = State::finished;
  if (--unfinished_ == 0) to_wake_.push_back(caller_);
  if (serial_)
    draw_next();
  else if (--running_ == 0 && unfinished_ > 0)
    stuck_();
}

}  // namespace shardproof::threads
