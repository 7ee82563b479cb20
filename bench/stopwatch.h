// How long a device takes.
#pragma once

#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>

namespace bench {

using Clock = std::chrono::steady_clock;

inline double milliseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

// Waits for the end of what was queued on the device. Without it, only the queuing is timed.
inline void finish(c10::Device device) {
  if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

}  // namespace bench
