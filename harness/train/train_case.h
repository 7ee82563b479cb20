// A stretch of a training run as a case: its model, mesh and strategy say who holds what, how the model is cut and how sums are
// taken.
#pragma once

#include "harness/case/case.h"
#include "harness/train/train_checkpoint.h"
#include "harness/train/train_options.h"

namespace harness {

Case train_case(const TrainOptions& options, const Stretch& stretch);

}  // namespace harness
