// Times the arithmetic of device_math.h against a copy of the same memory.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <string>
#include <vector>

namespace bench {

struct KernelsTask {
  c10::Device device{c10::kCPU};  // on the CPU: the kernels' twins
  int64_t mib = 256;              // of the longest array
  int64_t repeats = 20, rounds = 5;
};

struct KernelTime {
  std::string name;
  double gb_per_s = 0;       // of bytes read and written, median over rounds
  double share_of_copy = 0;  // over that of a copy in the same round, median
};

// The first is the copy. Each round times every kernel, `repeats` calls in a row. Throws Error where the device has no
// arithmetic.
std::vector<KernelTime> time_kernels(const KernelsTask& task);

}  // namespace bench
