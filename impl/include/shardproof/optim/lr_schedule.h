// Schedules of the learning rate, as factors for Optimizer::set_lr_factor. They are functions of the step alone, so a resumed
// run continues with the same rates.
#pragma once

#include <cstdint>

namespace shardproof {

// The factor is (step + 1) / warmup while step < warmup. It then falls to `last` at step `total`, along half a cosine or in a
// straight line, and stays there. Steps count from 0. Throws Error unless 0 <= warmup <= total and 0 <= last <= 1.
double warmup_cosine(int64_t step, int64_t warmup, int64_t total, double last = 0);
double warmup_linear(int64_t step, int64_t warmup, int64_t total, double last = 0);

}  // namespace shardproof
