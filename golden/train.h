// The golden run, one step at a time.
#pragma once

#include "golden/golden.h"
#include "golden/models.h"
#include "golden/optimizer.h"
#include "golden/sums.h"

namespace golden {

// `train` is a Trainer and a loop. Use it where a whole Trace would not fit in memory, or steps are compared
// as they come. Every tensor of a StepTrace is final: later steps make new ones.
class Trainer {
 public:
  // `parameters` are copied, and so are `buffers`, which each rank's own begin as; empty: as those of `train` begin. Throws
  // std::invalid_argument as `train` does.
  Trainer(Model model, Optimizer optimizer, const Named& parameters, SumOrder order, Precision precision = {},
          LossScaling scaling = {}, at::ScalarType dtype = at::kFloat, uint64_t jitter = 0,
          c10::Device device = c10::kCPU, double ema = 0, const Named& buffers = {});

  StepTrace step(const Step& step);
  // The weighted loss of a microbatch, with the parameters as they are, without dropout and with the statistics of that rank;
  // nothing changes.
  double loss(const Microbatch& microbatch, size_t rank = 0) const { return evaluated(parameters_, microbatch, rank); }

  const Named& parameters() const { return parameters_; }

 private:
  struct Collected;  // what a step's forwards and backwards need and leave

  // Values, and a rank's buffers: as they are, and to compute with.
  Parameters with_buffers(const Named& values, size_t rank) const;
  Parameters to_compute(const Named& values, size_t rank) const;
  double evaluated(const Named& values, const Microbatch& microbatch, size_t rank) const;
  // What a load does to buffers, and what makes them the step's own.
  void begin_buffers(const Step& step);
  // Gradients of one microbatch, in the order of the trained parameters.
  Tensors gradients(Collected& collected, size_t round, size_t rank) const;
  // A rank's sum over rounds [begin, end).
  Tensors local_sum(Collected& collected, size_t begin, size_t end, size_t rank) const;
  // Their sum over all microbatches in the prescribed order, before any final division.
  Tensors summed_gradients(Collected& collected) const;
  Tensors canonical_gradients(Collected& collected) const;

  // Adapts the scale to whether this step's gradients are finite.
  void adapt_scale(bool finite);

  void average(const Step& step);
  // Of experts, by what the step's forwards chose.
  void move_biases(const Counts& counts);

  const SumOrder& order_of(const Step& step) const { return step.order ? *step.order : order_; }

  Model model_;
  SumOrder order_;
  Precision precision_;
  LossScaling scaling_;
  uint64_t jitter_;
  c10::Device device_;
  at::ScalarType main_;  // dtype of parameters, optimizer state and losses
  Named parameters_;
  OptimizerState optimizer_;
  double loss_scale_;
  int64_t good_steps_ = 0;
  double ema_;
  Named averages_;  // empty when none are kept
  std::vector<Named> buffers_;  // [rank]
};

}  // namespace golden
