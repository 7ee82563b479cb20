// Host work that is not done before somebody waits for it: the latest that a system may do it.
#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "shardproof/base/host_work.h"

// Decides for the thread that made it, for as long as it lives.
class LateHostWork : public shardproof::HostWork {
 public:
  LateHostWork() : before_(std::exchange(of_this_thread(), this)) {}
  ~LateHostWork() override { of_this_thread() = before_; }

  std::unique_ptr<shardproof::HostJob> start(std::function<void()> work) override {
    return std::make_unique<Job>(std::move(work));
  }
  std::unique_ptr<shardproof::HostJob> later(std::function<void()> work) override { return start(std::move(work)); }
  void pause() override {}

 private:
  struct Job : shardproof::HostJob {
    explicit Job(std::function<void()> what) : work(std::move(what)) {}
    ~Job() override {
      try {
        wait();
      } catch (...) {
        // As of a thread that nobody asks.
      }
    }
    void wait() override {
      if (const auto now = std::exchange(work, nullptr)) now();
    }
    bool is_over() override { return !work; }
    std::function<void()> work;
  };
  HostWork* const before_;
};
