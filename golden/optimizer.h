// The optimizers over whole tensors, one IEEE operation at a time, as golden.h states them.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "golden/golden.h"

namespace golden {

class OptimizerState {
 public:
  OptimizerState(Optimizer optimizer, const Named& parameters);

  // Returns the new parameters; neither the old ones nor the gradients are touched, so that traces may keep
  // them. `gradients` are of the parameters that are not frozen, in the same order; the others stay.
  Named update(const Named& parameters, const Named& gradients, double lr_factor);

  // {"momentum_buffer", ...} or {"exp_avg", ...}, {"exp_avg_sq", ...}; empty for SGD without momentum. In each the parameters
  // that have it.
  std::vector<std::pair<std::string, Named>> tensors() const;

 private:
  // One parameter's.
  struct Held {
    std::string name;
    bool by_muon = false;
    double lr_factor = 1, decay_factor = 1;
    int64_t updates = 0;
    Named state;
  };
  at::Tensor update(Held& held, const at::Tensor& parameter, const at::Tensor& gradient, double lr_factor) const;

  Optimizer optimizer_;
  std::vector<Held> held_;
};

}  // namespace golden
