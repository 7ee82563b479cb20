#include "bench/profile.h"

#include <torch/csrc/autograd/profiler_kineto.h>

#include <set>
#include <utility>

namespace bench {

namespace profiler = torch::profiler::impl;

namespace {

const profiler::ProfilerConfig& config() {
  static const profiler::ProfilerConfig chosen(profiler::ProfilerState::KINETO, /*report_input_shapes=*/false,
                                               /*profile_memory=*/true);
  return chosen;
}

std::set<profiler::ActivityType> activities(c10::Device device) {
  if (device.is_cuda()) return {profiler::ActivityType::CPU, profiler::ActivityType::CUDA};
  return {profiler::ActivityType::CPU};
}

}  // namespace

void prepare_profile(c10::Device device) {
  torch::autograd::profiler::prepareProfiler(config(), activities(device));
}

Profile::Profile(std::string path, c10::Device device) : path_(std::move(path)) {
  torch::autograd::profiler::enableProfiler(config(), activities(device),
                                            {at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION});
}

Profile::~Profile() {
  torch::autograd::profiler::disableProfiler()->save(path_);
}

}  // namespace bench
