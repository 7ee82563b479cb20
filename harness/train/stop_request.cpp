#include "harness/train/stop_request.h"

#include <signal.h>

#include <array>
#include <atomic>

namespace harness {
namespace {

std::atomic<bool> requested{false};
static_assert(std::atomic<bool>::is_always_lock_free);
constexpr std::array kSignals{SIGINT, SIGTERM, SIGUSR1};
std::array<struct sigaction, kSignals.size()> before_stop_requests{};

}  // namespace

// SA_RESETHAND: the second one does what it did in the first place, which is to end the process.
StopRequests::StopRequests() {
  requested = false;
  struct sigaction action {};
  action.sa_handler = [](int) { requested = true; };
  action.sa_flags = SA_RESTART | static_cast<int>(SA_RESETHAND);
  for (size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &action, &before_stop_requests[i]);
}

StopRequests::~StopRequests() {
  for (size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &before_stop_requests[i], nullptr);
}

bool stop_requested() {
  return requested;
}

}  // namespace harness
