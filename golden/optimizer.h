// Optimizers over whole tensors, one IEEE operation at a time, as golden.h states them.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "golden/golden.h"

namespace golden {

class OptimizerState {
 public:
  OptimizerState(Optimizer optimizer, const Named& parameters);

  // Returns the new parameters; neither the old ones nor the gradients are touched, so that traces may keep them. `gradients`
  // are of some of the parameters, in their order; the others stay as they are.
  Named update(const Named& parameters, const Named& gradients, double lr_factor = 1);

  // By slot and parameter; only slots that some parameter has.
  const std::vector<std::pair<std::string, Named>>& tensors() const { return tensors_; }

 private:
  // What one update of one parameter starts from.
  struct Update {
    const std::string& name;
    const at::Tensor& parameter;
    const at::Tensor& gradient;
    double lr, weight_decay;  // after all factors
  };

  std::vector<std::string> slots_of(const at::Tensor& parameter) const;
  at::Tensor& state(const char* slot, const std::string& parameter);

  at::Tensor updated(const Update& update);
  at::Tensor sgd(const Update& update);
  at::Tensor adam(const Update& update, bool decoupled);
  at::Tensor lion(const Update& update);
  at::Tensor muon(const Update& update);

  Optimizer optimizer_;
  std::map<std::string, int64_t> updates_;  // of each parameter
  std::vector<std::pair<std::string, Named>> tensors_;
};

// Five Newton-Schulz steps from a matrix towards the nearest orthogonal one, as golden.h states them, on the matrix' device.
at::Tensor orthogonalized(const at::Tensor& matrix);

}  // namespace golden
