#include "comm/threads/threads_pool.h"

#include <ATen/ThreadLocalState.h>
#include <pthread.h>

#include <atomic>
#include <memory>
#include <system_error>
#include <thread>

#include "shardproof/base/check.h"

namespace shardproof::threads {

// A process that was forked has none of its parent's threads.
Pool& Pool::instance() {
  static std::atomic<Pool*> pool{new Pool};
  static const int failed = ::pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
  SHARD_CHECK(failed == 0, "threads", "a fork could not be prepared for: error {}", failed);
  return *pool;
}

void PoolThread::loop() {
  // A fresh thread's state: gradients on, no hooks. Each job starts from it, whatever an earlier one left behind.
  const at::ThreadLocalState fresh;
  while (true) {
    parker_.park();
    // Moved out first: once the job has announced its end, the next one may be assigned.
    const std::function<void()> job = std::move(job_);
    at::ThreadLocalStateGuard guard(fresh);
    job();
  }
}

PoolThread* Pool::start_thread() {
  auto thread = std::make_unique<PoolThread>();
  std::thread([raw = thread.get()] { raw->loop(); }).detach();
  return thread.release();
}

std::vector<PoolThread*> Pool::acquire(int64_t count) {
  std::vector<PoolThread*> threads;
  {
    std::lock_guard lock(mutex_);
    while (!idle_.empty() && static_cast<int64_t>(threads.size()) < count) {
      threads.push_back(idle_.back());
      idle_.pop_back();
    }
  }
  try {
    while (static_cast<int64_t>(threads.size()) < count) threads.push_back(start_thread());
  } catch (const std::system_error& error) {
    const size_t started = threads.size();
    release(threads);
    throw Error(fmt::format("[threads] the system gave {} of the {} threads asked for, one a rank ({}); use a smaller "
                            "world or raise its limits (ulimit -u, ulimit -v)",
                            started, count, error.what()));
  }
  return threads;
}

void Pool::release(const std::vector<PoolThread*>& threads) {
  std::lock_guard lock(mutex_);
  // Reversed, so that the same threads serve the same ranks next time.
  idle_.insert(idle_.end(), threads.rbegin(), threads.rend());
}

}  // namespace shardproof::threads
