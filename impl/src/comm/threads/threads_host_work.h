// Threads and copies beside the ranks of one world, where a policy decides when they go on.
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "shardproof/base/host_work.h"
#include "shardproof/comm/threads/schedule_policy.h"

namespace shardproof::threads {

class Scheduler;

// Of one thread of the world: a rank, or a thread that a rank started.
class ScheduledWork final : public HostWork {
 public:
  // `thread` is the scheduler's number of the calling thread.
  ScheduledWork(std::shared_ptr<Scheduler> scheduler, int64_t thread, const SchedulePolicy::Actor& actor)
      : scheduler_(std::move(scheduler)), thread_(thread), actor_(actor) {}

  std::unique_ptr<HostJob> start(std::function<void()> work) override;
  std::unique_ptr<HostJob> later(std::function<void()> work) override;
  void pause() override;

  // While it lives, the calling thread is that thread of the world.
  class OnThisThread;

 private:
  class Job;
  class ThreadJob;
  class CopyJob;

  const std::shared_ptr<Scheduler> scheduler_;
  const int64_t thread_;
  const SchedulePolicy::Actor actor_;
  int64_t threads_ = 0, copies_ = 0;
};

class ScheduledWork::OnThisThread {
 public:
  OnThisThread(std::shared_ptr<Scheduler> scheduler, int64_t thread, const SchedulePolicy::Actor& actor)
      : work_(std::move(scheduler), thread, actor) {
    HostWork::of_this_thread() = &work_;
  }
  ~OnThisThread() { HostWork::of_this_thread() = nullptr; }
  OnThisThread(const OnThisThread&) = delete;
  OnThisThread& operator=(const OnThisThread&) = delete;

 private:
  ScheduledWork work_;
};

}  // namespace shardproof::threads
