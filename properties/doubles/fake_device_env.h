// For programs some of whose tests run backwards on the CPU: LibTorch's engine makes its queues at the first backward of a
// process, for the devices that there are by then. So the device has to be there before the first test.
#pragma once

#include <gtest/gtest.h>

#include "properties/doubles/fake_device.h"

namespace fake_device {

class Environment final : public ::testing::Environment {
  void SetUp() override { install(); }
};
inline ::testing::Environment* const environment = ::testing::AddGlobalTestEnvironment(new Environment);

}  // namespace fake_device
