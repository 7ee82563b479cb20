// Rank-threads that train on the fake device.
#pragma once

#include <memory>

#include "harness/run/ranks.h"
#include "properties/doubles/fake_device.h"

namespace fake_device {

inline harness::Ranks& ranks() {
  install();
  static const std::unique_ptr<harness::Ranks> one = harness::thread_ranks_on(device());
  return *one;
}

}  // namespace fake_device
