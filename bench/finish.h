// The end of what was queued on a device, without which its time is that of queuing.
#pragma once

#include <c10/core/impl/VirtualGuardImpl.h>

namespace bench {

inline void finish(c10::Device device) {
  if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

}  // namespace bench
