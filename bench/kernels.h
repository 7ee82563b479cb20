// Times the arithmetic of device_math.h against a copy of the same memory.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <string>
#include <vector>

namespace bench {

struct KernelsTask {
  c10::Device device{c10::kCPU};  // on the CPU: one thread
  int64_t mib = 256;              // of the longest array
  int64_t repeats = 20, rounds = 5;
};

struct KernelTimes {
  std::string name;
  std::vector<double> gb_per_s;       // of bytes read and written, by round
  std::vector<double> share_of_copy;  // over that of a copy in the same round
};

// The first is the copy. Each round times every kernel, `repeats` calls in a row. Throws Error where the device has no
// arithmetic.
std::vector<KernelTimes> time_kernels(const KernelsTask& task);

}  // namespace bench
