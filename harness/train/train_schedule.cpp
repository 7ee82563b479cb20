#include "harness/train/train_schedule.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "shardproof/base/check.h"
#include "shardproof/optim/lr_schedule.h"

namespace harness {

std::vector<std::string> schedule_kinds() {
  return {"constant", "cosine", "linear", "wsd", "inverse-sqrt"};
}

void validate(const TrainSchedule& s) {
  const std::vector<std::string> kinds = schedule_kinds();
  SHARD_REQUIRE(std::ranges::find(kinds, s.kind) != kinds.end(), "train", "--schedule must be one of {}, got '{}'",
                fmt::join(kinds, ", "), s.kind);
  SHARD_REQUIRE(s.warmup >= 0, "train", "--warmup must be at least 0, got {}", s.warmup);
  if (!s.ends()) return;
  SHARD_REQUIRE(s.warmup <= s.total, "train", "--warmup {} is longer than the schedule's {} steps; see --schedule-steps",
                s.warmup, s.total);
  SHARD_REQUIRE(s.last >= 0 && s.last <= 1, "train", "--lr-last is a part of --lr, in [0, 1], got {}", s.last);
  SHARD_REQUIRE(s.kind != "wsd" || (s.decay >= 0 && s.decay <= s.total - s.warmup), "train",
                "--decay-steps must be in [0, {}], the schedule's steps after the warm-up, got {}", s.total - s.warmup,
                s.decay);
}

double lr_factor(const TrainSchedule& s, int64_t step) {
  if (s.kind == "cosine") return shardproof::warmup_cosine(step, s.warmup, s.total, s.last);
  if (s.kind == "linear") return shardproof::warmup_linear(step, s.warmup, s.total, s.last);
  if (s.kind == "wsd") return shardproof::warmup_stable_decay(step, s.warmup, s.total, s.decay, s.last);
  if (s.kind == "inverse-sqrt") return shardproof::warmup_inverse_sqrt(step, s.warmup);
  return shardproof::warmup_constant(step, s.warmup);
}

}  // namespace harness
