#include "shardproof/base/host_work.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <future>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "shardproof/base/check.h"

namespace shardproof {
namespace {

using Task = std::packaged_task<void()>;

// Threads that run jobs, and then wait for another. A save starts a job for every 4 MiB, and starting a thread takes a
// noticeable part of the time that a disk takes for those. What is bound to a thread stays there for its next job, so that a
// job has to leave nothing behind.
class JobThreads {
 public:
  // Never deleted: its threads wait until the process ends. A process that was forked has none of its parent's threads.
  static JobThreads& of_this_process() {
    static std::atomic<JobThreads*> known{nullptr};
    static const int failed = ::pthread_atfork(nullptr, nullptr, [] { known = nullptr; });
    SHARD_CHECK(failed == 0, "host work", "a fork could not be prepared for: error {}", failed);
    JobThreads* threads = known;
    if (threads) return *threads;
    auto* const own = new JobThreads;
    if (known.compare_exchange_strong(threads, own)) return *own;
    delete own;
    return *threads;
  }

  // On a thread that does nothing else meanwhile, or on the calling one where the system has no thread left.
  void run(Task task) {
    std::unique_lock lock(mutex_);
    tasks_.push_back(std::move(task));
    if (idle_ > 0) {
      --idle_;
    } else if (!start_thread()) {
      Task own = std::move(tasks_.back());
      tasks_.pop_back();
      lock.unlock();
      return own();
    }
    lock.unlock();
    came_.notify_one();
  }

 private:
  bool start_thread() {
    try {
      std::thread([this] { serve(); }).detach();
      return true;
    } catch (const std::system_error&) {
      return false;
    }
  }

  [[noreturn]] void serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      came_.wait(lock, [this] { return !tasks_.empty(); });
      {
        Task task = std::move(tasks_.front());
        tasks_.pop_front();
        lock.unlock();
        task();
      }
      lock.lock();
      ++idle_;
    }
  }

  std::mutex mutex_;
  std::condition_variable came_;
  std::deque<Task> tasks_;
  int64_t idle_ = 0;  // threads that wait, less one for each task that waits
};

class SystemJob final : public HostJob {
 public:
  explicit SystemJob(std::function<void()> work) {
    // The work is gone before the job is over: a task may live longer.
    Task task([work = std::move(work)]() mutable {
      const auto own = std::move(work);
      own();
    });
    over_ = task.get_future();
    JobThreads::of_this_process().run(std::move(task));
  }
  ~SystemJob() override {
    if (over_.valid()) over_.wait();
  }

  void wait() override {
    if (over_.valid()) over_.get();
  }
  bool is_over() override { return !over_.valid() || over_.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }

 private:
  std::future<void> over_;
};

}  // namespace

HostWork*& HostWork::of_this_thread() {
  thread_local HostWork* decides = nullptr;
  return decides;
}

std::unique_ptr<HostJob> start_host_job(std::function<void()> work) {
  if (HostWork* decides = HostWork::of_this_thread()) return decides->start(std::move(work));
  return std::make_unique<SystemJob>(std::move(work));
}

}  // namespace shardproof
