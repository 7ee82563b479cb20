#include "threads_scheduler.h"

#include <numeric>

namespace shardproof::threads {

uint64_t next_random(uint64_t& state) {
  uint64_t z = (state += 0x9e3779b97f4a7c15);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
  z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
  return z ^ (z >> 31);
}

Scheduler::Scheduler(std::vector<Parker*> parkers, bool serial, uint64_t seed, std::function<void()> stuck)
    : parkers_(std::move(parkers)),
      serial_(serial),
      random_(seed),
      stuck_(std::move(stuck)),
      states_(parkers_.size(), serial ? State::runnable : State::running),
      unfinished_(static_cast<int64_t>(parkers_.size())) {
  if (serial_) {
    runnable_.resize(parkers_.size());
    std::iota(runnable_.begin(), runnable_.end(), 0);
  } else {
    running_ = unfinished_;
  }
}

void Scheduler::start() {
  if (serial_) return let_next_run();
  for (Parker* parker : parkers_) parker->unpark();
}

void Scheduler::let_next_run() {
  if (runnable_.empty() && unfinished_ > 0) stuck_();
  if (runnable_.empty()) return;
  const size_t drawn = next_random(random_) % runnable_.size();
  const int64_t rank = runnable_[drawn];
  runnable_[drawn] = runnable_.back();
  runnable_.pop_back();
  states_[rank] = State::running;
  parkers_[rank]->unpark();
}

void Scheduler::block(Lock& lock, int64_t rank) {
  states_[rank] = State::blocked;
  if (serial_)
    let_next_run();
  else if (--running_ == 0)
    stuck_();
  lock.unlock();
  parkers_[rank]->park();
  lock.lock();
}

void Scheduler::ready(int64_t rank) {
  if (states_[rank] != State::blocked) return;
  if (serial_) {
    states_[rank] = State::runnable;
    runnable_.push_back(rank);
  } else {
    states_[rank] = State::running;
    ++running_;
    parkers_[rank]->unpark();
  }
}

void Scheduler::yield(Lock& lock, int64_t rank) {
  if (!serial_ || runnable_.empty()) return;
  states_[rank] = State::runnable;
  runnable_.push_back(rank);
  let_next_run();
  if (states_[rank] == State::running) return parkers_[rank]->park();  // drew itself: takes its own permit
  lock.unlock();
  parkers_[rank]->park();
  lock.lock();
}

void Scheduler::finish(int64_t rank) {
  states_[rank] = State::finished;
  --unfinished_;
  if (serial_)
    let_next_run();
  else if (--running_ == 0 && unfinished_ > 0)
    stuck_();
}

}  // namespace shardproof::threads
