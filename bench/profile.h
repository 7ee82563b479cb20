// What LibTorch's profiler sees while an object lives: operators, kernels, and each allocation with the memory in use.
#pragma once

#include <c10/core/Device.h>

#include <string>

namespace bench {

// Before the first Profile, and on the process' first thread, as Kineto wants it.
void prepare_profile(c10::Device device);

class Profile {
 public:
  // Of the calling thread, of backwards that it starts, and of the device. Kernels are seen where LibTorch has CUPTI.
  explicit Profile(std::string path, c10::Device device);
  // Writes it in the format of Chrome's traces, as torch.profiler does.
  ~Profile();
  Profile(const Profile&) = delete;
  Profile& operator=(const Profile&) = delete;

 private:
  std::string path_;
};

}  // namespace bench
