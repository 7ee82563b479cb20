// Measures this machine, where ranks are threads.
#pragma once

#include <functional>
#include <string>

#include "harness/plan/machine.h"

namespace harness {

// The rates of a thread while all cores work, as the ranks of a host do: of matrix products in float32 and bf16, and of copies
// in memory, which the cores share. Also the time of a small operator, and latency and bandwidth of the threads' communicator
// between two ranks. At last each core trains a small GPT. Its step may take longer than these rates say, because memory is
// fetched anew or functions are computed; the efficiency of products is chosen so that they say the same. Each rate is that of
// the fastest of several rounds, and all but those of the communicator are in processor time, since other programs only make
// them slower. It takes some seconds. `shown` hears what is measured next.
Machine calibrate(const std::function<void(const std::string&)>& shown);

}  // namespace harness
