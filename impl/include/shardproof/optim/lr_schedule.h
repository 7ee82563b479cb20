// Schedules of the learning rate, as factors for Optimizer::set_lr_factor. They are functions of the step alone, so a resumed
// run continues with the same rates.
#pragma once

#include <cstdint>

namespace shardproof {

// The factor is (step + 1) / warmup while step < warmup. It then falls to `last` at step `total`, along half a cosine or in a
// straight line, and stays there. Steps count from 0. Throws Error unless 0 <= warmup <= total and 0 <= last <= 1.
double warmup_cosine(int64_t step, int64_t warmup, int64_t total, double last = 0);
double warmup_linear(int64_t step, int64_t warmup, int64_t total, double last = 0);
// Warm-up, stable, decay (Hu et al. 2024, "MiniCPM"): after the warm-up the factor is 1 until `decay` steps before `total`, and
// then falls to `last` in a straight line. Throws Error too unless 0 <= decay <= total - warmup.
double warmup_stable_decay(int64_t step, int64_t warmup, int64_t total, int64_t decay, double last = 0);
// After the warm-up the factor is 1; or falls as sqrt(max(1, warmup) / (step + 1)) (Vaswani et al. 2017).
double warmup_constant(int64_t step, int64_t warmup);
double warmup_inverse_sqrt(int64_t step, int64_t warmup);

}  // namespace shardproof
