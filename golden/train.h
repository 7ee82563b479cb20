// The golden run, one step at a time.
#pragma once

#include "golden/golden.h"
#include "golden/optimizer.h"

namespace golden {

// `train` is a Trainer and a loop. Use it where a whole Trace would not fit in memory, or steps are compared
// as they come. Every tensor of a StepTrace is final: later steps make new ones.
class Trainer {
 public:
  // `parameters` are copied. Throws std::invalid_argument as `train` does.
  Trainer(Model model, Optimizer optimizer, const Named& parameters, SumOrder order,
          at::ScalarType dtype = at::kFloat);

  StepTrace step(const Step& step);

  const Named& parameters() const { return parameters_; }

 private:
  // Gradients of one microbatch, new tensors in the order of the parameters.
  std::vector<at::Tensor> gradients(const Microbatch& microbatch, double* loss) const;
  // Their sum over all microbatches in the prescribed order.
  std::vector<at::Tensor> summed_gradients(const Step& step, std::vector<std::vector<double>>* losses) const;

  Model model_;
  SumOrder order_;
  at::ScalarType dtype_;
  Named parameters_;
  OptimizerState optimizer_;
};

}  // namespace golden
