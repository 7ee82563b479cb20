#include "bench/profile.h"

#include <torch/csrc/autograd/profiler_kineto.h>

#include <set>
#include <utility>

namespace bench {

namespace profiler = torch::profiler::impl;

Profile::Profile(std::string path, c10::Device device) : path_(std::move(path)) {
  const profiler::ProfilerConfig config(profiler::ProfilerState::KINETO, /*report_input_shapes=*/false,
                                        /*profile_memory=*/true);
  std::set<profiler::ActivityType> activities = {profiler::ActivityType::CPU};
  if (device.is_cuda()) activities.insert(profiler::ActivityType::CUDA);
  torch::autograd::profiler::prepareProfiler(config, activities);
  torch::autograd::profiler::enableProfiler(config, activities,
                                            {at::RecordScope::FUNCTION, at::RecordScope::BACKWARD_FUNCTION});
}

Profile::~Profile() {
  torch::autograd::profiler::disableProfiler()->save(path_);
}

}  // namespace bench
