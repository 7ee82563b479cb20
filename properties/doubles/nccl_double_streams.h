// Streams and events of the double of NCCL.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace nccl_double {

// A moment in a stream.
struct Moment {
  explicit Moment(bool is_captured = false) : is_captured(is_captured) {}
  const bool is_captured;
  std::mutex mutex;
  std::condition_variable passed;
  bool over = false;

  void pass() {
    {
      const std::lock_guard lock(mutex);
      over = true;
    }
    passed.notify_all();
  }
  void wait() {
    std::unique_lock lock(mutex);
    passed.wait(lock, [this] { return over; });
  }
  bool wait_for(std::chrono::seconds time) {
    std::unique_lock lock(mutex);
    return passed.wait_for(lock, time, [this] { return over; });
  }
  bool is_over() {
    const std::lock_guard lock(mutex);
    return over;
  }
};

// An event stands for the moment it was last recorded at.
struct EventBox {
  std::mutex mutex;
  std::shared_ptr<Moment> moment;
};

// Runs what it is given one after the other, on a thread that begins with the first.
class StreamQueue {
 public:
  ~StreamQueue() {
    {
      const std::lock_guard lock(mutex_);
      ends_ = true;
    }
    woken_.notify_one();
    if (thread_.joinable()) thread_.join();
  }

  // Whether nothing that it was given with `work` is left to do.
  bool is_idle() const { return works_ == 0; }
  void work(std::function<void()> task) {
    ++works_;
    push([this, task = std::move(task)] {
      task();
      --works_;
    });
  }
  void push(std::function<void()> task) {
    {
      const std::lock_guard lock(mutex_);
      tasks_.push_back(std::move(task));
      if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
    }
    woken_.notify_one();
  }

 private:
  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      woken_.wait(lock, [this] { return ends_ || !tasks_.empty(); });
      if (tasks_.empty()) return;
      const auto task = std::move(tasks_.front());
      tasks_.pop_front();
      lock.unlock();
      task();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable woken_;
  std::deque<std::function<void()>> tasks_;
  bool ends_ = false;
  std::atomic<int64_t> works_ = 0;
  std::thread thread_;
};

}  // namespace nccl_double
