// The golden run, one step at a time.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "golden/golden.h"
#include "golden/optimizer.h"

namespace golden {

// `train` is a Trainer and a loop. Use it where a whole Trace would not fit in memory, or steps are compared
// as they come. Every tensor of a StepTrace is final: later steps make new ones.
class Trainer {
 public:
  // Of the run everything but its steps; parameters are copied. Throws std::invalid_argument as `train` does.
  explicit Trainer(const Run& run, at::ScalarType dtype = at::kFloat);

  StepTrace step(const Step& step);

  const Named& parameters() const { return parameters_; }

 private:
  void update(const Step& step, const std::set<std::string>& frozen, std::vector<at::Tensor> gradients, StepTrace& trace);

  Model model_;
  SumOrder order_;
  Precision precision_;
  at::ScalarType dtype_;
  Named parameters_;
  OptimizerState optimizer_;
  LossScaling scaling_;
  double loss_scale_ = 0;
  int64_t good_steps_ = 0;
};

}  // namespace golden
