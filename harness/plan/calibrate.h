// Measures this machine, where ranks are threads.
#pragma once

#include <functional>
#include <string>

#include "harness/plan/machine.h"

namespace harness {

// The rate of matrix products of one thread in float32 and bf16, what one thread copies, the time of a small operator, and
// latency and bandwidth of the threads' communicator between two ranks. Each is the median of rounds. It takes a few seconds,
// and the machine should have nothing else to do. `shown` hears what is measured next.
Machine calibrate(const std::function<void(const std::string&)>& shown);

}  // namespace harness
