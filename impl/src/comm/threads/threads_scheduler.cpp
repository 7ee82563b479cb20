#include "comm/threads/threads_scheduler.h"

#include <numeric>

namespace shardproof::threads {

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
  if (serial_)
    draw_next();
  else
    to_wake_ = parkers_;
}

void Scheduler::draw_next() {
  if (runnable_.empty() && unfinished_ > 0) stuck_();
  if (runnable_.empty()) return;
  const size_t drawn = next_random(random_) % runnable_.size();
  const int64_t rank = runnable_[drawn];
  runnable_[drawn] = runnable_.back();
  runnable_.pop_back();
  states_[rank] = State::running;
  to_wake_.push_back(parkers_[rank]);
}

void Scheduler::sleep(Lock& lock, int64_t rank) {
  lock.unlock();
  parkers_[rank]->park();
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
  if (!serial_ || runnable_.empty()) return;
  states_[rank] = State::runnable;
  runnable_.push_back(rank);
  draw_next();
  sleep(lock, rank);
}

void Scheduler::finish(int64_t rank) {
  states_[rank] = State::finished;
  --unfinished_;
  if (serial_)
    draw_next();
  else if (--running_ == 0 && unfinished_ > 0)
    stuck_();
}

}  // namespace shardproof::threads
