#include "harness/train/stop_request.h"

#include <signal.h>
#include <time.h>

#include <array>
#include <atomic>
#include <cstdint>

namespace harness {
namespace {

// A launcher, a batch system and a shell may each pass on one and the same request.
constexpr int64_t kOneRequest = 1'000'000'000;  // nanoseconds

std::atomic<int64_t> requested_at{0};  // by the monotonic clock; 0: nobody has asked
static_assert(std::atomic<int64_t>::is_always_lock_free);
constexpr std::array kSignals{SIGINT, SIGTERM, SIGUSR1};
std::array<struct sigaction, kSignals.size()> before_stop_requests{};

int64_t now() {
  timespec time{};
  ::clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1'000'000'000 + time.tv_nsec;
}

// Only what is safe in a handler. A later request does what the signal does in the first place, which is to end the process.
void request(int signal) {
  int64_t first = 0;
  if (requested_at.compare_exchange_strong(first, now()) || now() - first < kOneRequest) return;
  ::signal(signal, SIG_DFL);
  ::raise(signal);
}

}  // namespace

StopRequests::StopRequests() {
  requested_at = 0;
  struct sigaction action {};
  action.sa_handler = request;
  action.sa_flags = SA_RESTART;
  for (size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &action, &before_stop_requests[i]);
}

StopRequests::~StopRequests() {
  for (size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &before_stop_requests[i], nullptr);
}

bool stop_requested() {
  return requested_at != 0;
}

}  // namespace harness
