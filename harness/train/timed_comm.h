// How long a rank computes: the time of its step without the time that it spends in calls of its communicators.
#pragma once

#include <atomic>
#include <functional>
#include <memory>

#include "shardproof/comm/comm.h"

namespace harness {

// Seconds since some moment.
using Clock = std::function<double()>;

// The seconds that one rank has spent in calls, and in waiting for them.
class CallTime {
 public:
  explicit CallTime(Clock now) : now_(std::move(now)) {}
  double now() const { return now_(); }
  double seconds() const { return seconds_.load(); }
  // Runs the call and adds its time.
  template <class Call>
  auto timed(Call&& call) {
    const Span span(*this);
    return call();
  }

 private:
  struct Span {
    explicit Span(CallTime& time) : time_(time), begin_(time.now()) {}
    ~Span() { time_.seconds_ = time_.seconds_ + (time_.now() - begin_); }
    CallTime& time_;
    double begin_;
  };
  Clock now_;
  std::atomic<double> seconds_ = 0;  // written by one thread at a time, that of the rank or of its backward
};

// A decorator for any backend: whatever this rank calls, in the group or in those that are split from it, adds to `time`.
std::shared_ptr<shardproof::Comm> timed(std::shared_ptr<shardproof::Comm> inner, std::shared_ptr<CallTime> time);

}  // namespace harness
