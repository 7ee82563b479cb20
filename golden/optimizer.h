// SGD and AdamW over whole tensors, one IEEE operation at a time, as golden.h states them.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "golden/golden.h"

namespace golden {

class OptimizerState {
 public:
  OptimizerState(Optimizer optimizer, const Named& parameters);

  // Returns the new parameters; neither the old ones nor the gradients are touched, so that traces may keep
  // them.
  Named update(const Named& parameters, const Named& gradients);

  // {"momentum_buffer", ...} or {"exp_avg", ...}, {"exp_avg_sq", ...}; empty for SGD without momentum.
  const std::vector<std::pair<std::string, Named>>& tensors() const { return tensors_; }

 private:
  at::Tensor sgd(size_t index, const at::Tensor& parameter, const at::Tensor& gradient);
  at::Tensor adamw(size_t index, const at::Tensor& parameter, const at::Tensor& gradient);
  at::Tensor& state(size_t which, size_t index) { return tensors_[which].second[index].second; }

  Optimizer optimizer_;
  int64_t steps_ = 0;
  std::vector<std::pair<std::string, Named>> tensors_;
};

}  // namespace golden
