// Whether somebody asked this process to stop: Ctrl-C, SIGTERM, which batch systems send before they end a job, or SIGUSR1,
// which they can be told to send earlier. Asked once, a run ends after its step and saves; asked again more than a second
// later, it ends at once. What comes within a second is one request, which several programs may have passed on.
#pragma once

namespace harness {

// The exit code of a run that ended so. It is EX_TEMPFAIL of <sysexits.h>, which invites whoever called to try again.
constexpr int kStoppedAsAsked = 75;

// While it lives, signals ask. There is one in a process.
class StopRequests {
 public:
  StopRequests();
  ~StopRequests();
  StopRequests(const StopRequests&) = delete;
};

// Whether one of them came. Any thread may call it.
bool stop_requested();

}  // namespace harness
