#include "comm/threads/threads_host_work.h"

#include <exception>
#include <optional>
#include <thread>
#include <utility>

#include "comm/threads/threads_scheduler.h"
#include "shardproof/base/check.h"

namespace shardproof::threads {
namespace {

using Actor = SchedulePolicy::Actor;

// So that threads which threads start have names of their own.
constexpr int64_t kThreadsOfAThread = 1024;

}  // namespace

// What both kinds of work have: whether it is over, and the thread that is blocked until then.
class ScheduledWork::Job : public HostJob {
 public:
  explicit Job(std::shared_ptr<Scheduler> scheduler) : scheduler_(std::move(scheduler)) {}

  bool is_over() override {
    pause_here();
    Scheduler::Lock lock(*scheduler_);
    return over_;
  }

 protected:
  // On a thread of the world. One of the world's threads waits for a job, and no other.
  void block() {
    auto* waiting = dynamic_cast<ScheduledWork*>(HostWork::of_this_thread());
    Scheduler::Lock lock(*scheduler_);
    if (over_) return;
    SHARD_CHECK(waiting && waiting->scheduler_ == scheduler_, "threads", "scheduled work is awaited outside of its world");
    scheduler_->yield(lock, waiting->thread_);
    while (!over_) {
      waiter_ = waiting->thread_;
      scheduler_->block(lock, *waiter_);
      waiter_.reset();
    }
  }
  // Under the lock.
  void end() {
    over_ = true;
    if (waiter_) scheduler_->ready(*waiter_);
  }
  bool awaited() const { return waiter_.has_value(); }

  const std::shared_ptr<Scheduler> scheduler_;

 private:
  bool over_ = false;
  std::optional<int64_t> waiter_;
};

class ScheduledWork::ThreadJob final : public Job {
 public:
  ThreadJob(std::shared_ptr<Scheduler> scheduler, const Actor& actor, std::function<void()> work) : Job(std::move(scheduler)) {
    {
      Scheduler::Lock lock(*scheduler_);
      number_ = scheduler_->add_thread(&parker_, actor, [this] { return awaited(); });
    }
    thread_ = std::thread([this, actor, work = std::move(work)] { run(actor, work); });
  }
  ~ThreadJob() override { join(); }

  void wait() override {
    join();
    if (const std::exception_ptr error = std::exchange(error_, nullptr)) std::rethrow_exception(error);
  }

 private:
  void run(const Actor& actor, const std::function<void()>& work) {
    parker_.park();
    {
      const OnThisThread decides(scheduler_, number_, actor);
      try {
        work();
      } catch (...) {
        error_ = std::current_exception();
      }
    }
    Scheduler::Lock lock(*scheduler_);
    end();
    scheduler_->finish(number_);
  }
  void join() {
    if (!thread_.joinable()) return;
    block();
    thread_.join();
  }

  Parker parker_;
  int64_t number_ = 0;
  std::exception_ptr error_;
  std::thread thread_;
};

class ScheduledWork::CopyJob final : public Job {
 public:
  CopyJob(std::shared_ptr<Scheduler> scheduler, const Actor& actor, std::function<void()> work) : Job(std::move(scheduler)) {
    Scheduler::Lock lock(*scheduler_);
    const auto happen = [this, work = std::move(work)] {
      work();
      end();
    };
    scheduler_->add_event({.actor = actor, .happen = happen, .awaited = [this] { return awaited(); }});
  }
  ~CopyJob() override { block(); }
  void wait() override { block(); }
};

std::unique_ptr<HostJob> ScheduledWork::start(std::function<void()> work) {
  const Actor actor{Actor::Kind::host_thread, actor_.rank, actor_.number * kThreadsOfAThread + ++threads_};
  auto job = std::make_unique<ThreadJob>(scheduler_, actor, std::move(work));
  pause();
  return job;
}

std::unique_ptr<HostJob> ScheduledWork::later(std::function<void()> work) {
  const Actor actor{Actor::Kind::copy, actor_.rank, actor_.number * kThreadsOfAThread + ++copies_};
  auto job = std::make_unique<CopyJob>(scheduler_, actor, std::move(work));
  pause();
  return job;
}

void ScheduledWork::pause() {
  Scheduler::Lock lock(*scheduler_);
  scheduler_->yield(lock, thread_);
}

}  // namespace shardproof::threads
