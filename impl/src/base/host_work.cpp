#include "shardproof/base/host_work.h"

#include <atomic>
#include <exception>
#include <thread>
#include <utility>

namespace shardproof {
namespace {

class SystemJob final : public HostJob {
 public:
  explicit SystemJob(std::function<void()> work)
      : thread_([this, work = std::move(work)] {
          try {
            work();
          } catch (...) {
            error_ = std::current_exception();
          }
          over_ = true;
        }) {}
  ~SystemJob() override {
    if (thread_.joinable()) thread_.join();
  }

  void wait() override {
    if (thread_.joinable()) thread_.join();
    if (const std::exception_ptr error = std::exchange(error_, nullptr)) std::rethrow_exception(error);
  }
  bool is_over() override { return over_; }

 private:
  std::exception_ptr error_;
  std::atomic<bool> over_{false};
  std::thread thread_;  // the last member: it uses the others
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
