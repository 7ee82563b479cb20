// Learning rates over time, as factors for Optimizer::set_lr_factor. Pure functions of the step, so a resumed run has the same.
#pragma once

#include <cstdint>

namespace shardproof {

// (step + 1) / warmup while step < warmup; then falling to `last` at step `total`, and `last` from there on: along half a
// cosine, or in a straight line. Steps count from 0. Throws Error unless 0 <= warmup <= total and 0 <= last <= 1.
double warmup_cosine(int64_t step, int64_t warmup, int64_t total, double last = 0);
double warmup_linear(int64_t step, int64_t warmup, int64_t total, double last = 0);

}  // namespace shardproof
