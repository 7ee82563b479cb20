// What the library does on the host beside the thread that called it: threads that write files, and copies that are under way.
// The system decides when such work happens. Where a test decides it instead, it gives its threads a HostWork.
#pragma once

#include <functional>
#include <memory>

namespace shardproof {

// Work under way. The destructor waits for it, and forgets what it threw.
class HostJob {
 public:
  virtual ~HostJob() = default;
  // Returns when the work is over. Throws what the work threw, once.
  virtual void wait() = 0;
  virtual bool is_over() = 0;
};

class HostWork {
 public:
  virtual ~HostWork() = default;
  // Runs the work on a thread that does nothing else meanwhile. A later job may get it, so work leaves nothing behind there.
  virtual std::unique_ptr<HostJob> start(std::function<void()> work) = 0;
  // Does the work at some time before the job's wait returns. The work neither blocks nor throws.
  virtual std::unique_ptr<HostJob> later(std::function<void()> work) = 0;
  // Another thread may go on before the calling one does.
  virtual void pause() = 0;

  // Who decides for the calling thread. It is null unless a test has set it.
  static HostWork*& of_this_thread();
};

// Runs the work as HostWork::start does, when the system or the HostWork of this thread says so. Where the system has no thread
// left, the calling thread does the work before this returns.
std::unique_ptr<HostJob> start_host_job(std::function<void()> work);

// Lets another thread go on where a test decides which; else nothing happens.
inline void pause_here() {
  if (HostWork* decides = HostWork::of_this_thread()) decides->pause();
}

}  // namespace shardproof
