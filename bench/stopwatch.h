// How long a device takes.
#pragma once

#include <c10/core/impl/VirtualGuardImpl.h>
#include <time.h>

#include <chrono>

namespace bench {

using Clock = std::chrono::steady_clock;

inline double milliseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

// Of this thread: what other programs do beside it is not in it, and neither are its waits.
inline double processor_milliseconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return 1e3 * static_cast<double>(now.tv_sec) + 1e-6 * static_cast<double>(now.tv_nsec);
}

// Waits for the end of what was queued on the device. Without it, only the queuing is timed.
inline void finish(c10::Device device) {
  if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

}  // namespace bench
