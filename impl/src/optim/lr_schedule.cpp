#include "shardproof/optim/lr_schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "shardproof/base/check.h"

namespace shardproof {
namespace {

void require_valid(int64_t step, int64_t warmup, int64_t total, double last) {
  SHARD_REQUIRE(
      0 <= warmup && warmup <= total && last >= 0 && last <= 1 && step >= 0, "lr_schedule",
      "needs 0 <= warmup <= total, a last factor in [0, 1] and a step of at least 0, got warmup {}, total {}, last {}, step {}",
      warmup, total, last, step);
}

// How far the fall has come, in [0, 1]; below 0 during the warm-up.
double progress(int64_t step, int64_t warmup, int64_t total, double last) {
  require_valid(step, warmup, total, last);
  if (step < warmup) return -1;
  if (step >= total) return 1;
  return static_cast<double>(step - warmup) / static_cast<double>(total - warmup);
}

double rising(int64_t step, int64_t warmup) { return static_cast<double>(step + 1) / static_cast<double>(warmup); }

}  // namespace

double warmup_cosine(int64_t step, int64_t warmup, int64_t total, double last) {
  const double done = progress(step, warmup, total, last);
  return done < 0 ? rising(step, warmup) : last + (1 - last) * 0.5 * (1 + std::cos(std::numbers::pi * done));
}

double warmup_linear(int64_t step, int64_t warmup, int64_t total, double last) {
  const double done = progress(step, warmup, total, last);
  return done < 0 ? rising(step, warmup) : last + (1 - last) * (1 - done);
}

double warmup_stable_decay(int64_t step, int64_t warmup, int64_t total, int64_t decay, double last) {
  require_valid(step, warmup, total, last);
  SHARD_REQUIRE(0 <= decay && decay <= total - warmup, "lr_schedule",
                "needs 0 <= decay <= total - warmup, got decay {}, total {} and warmup {}", decay, total, warmup);
  if (step < total - decay) return warmup_constant(step, warmup);
  return warmup_linear(step, total - decay, total, last);
}

double warmup_constant(int64_t step, int64_t warmup) {
  SHARD_REQUIRE(warmup >= 0 && step >= 0, "lr_schedule", "needs a warmup and a step of at least 0, got {} and {}", warmup,
                step);
  return step < warmup ? rising(step, warmup) : 1;
}

double warmup_inverse_sqrt(int64_t step, int64_t warmup) {
  const double factor = warmup_constant(step, warmup);
  const auto first = static_cast<double>(std::max<int64_t>(1, warmup));
  return step < warmup ? factor : std::sqrt(first / static_cast<double>(step + 1));
}

}  // namespace shardproof
