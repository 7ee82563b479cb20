#include "shardproof/optim/loss_scaler.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "shardproof/base/check.h"
#include "shardproof/device/device_graph.h"

namespace shardproof {

LossScaler::LossScaler(LossScalerOptions options) : options_(options), scale_(options.initial) {
  SHARD_REQUIRE(
      options.initial > 0 && std::isfinite(options.initial) && options.growth > 1 && options.backoff > 0 &&
          options.backoff < 1 && options.growth_interval >= 1 && options.scale_min > 0,
      "loss_scaler",
      "needs initial > 0, growth > 1, backoff in (0, 1), growth_interval >= 1 and scale_min > 0, got {}, {}, {}, {}, {}",
      options.initial, options.growth, options.backoff, options.growth_interval, options.scale_min);
}

void LossScaler::set_state(const State& state) {
  SHARD_REQUIRE(state.scale > 0 && std::isfinite(state.scale) && state.good_steps >= 0, "loss_scaler",
                "a state needs a scale above 0 and good_steps of at least 0, got {} and {}", state.scale, state.good_steps);
  scale_ = state.scale;
  good_steps_ = state.good_steps;
}

at::Tensor LossScaler::scale(const at::Tensor& loss) const {
  SHARD_REQUIRE(!is_capturing(), "loss_scaler",
                "LossScaler::scale inside of a captured step: a replay would keep the scale of {}, whatever it is then. Train "
                "without a scaler, in bfloat16, or without a graph",
                scale_);
  return loss * scale_;
}

bool LossScaler::unscale(Sharded& sharded) {
  if (sharded.gradients_are_finite()) {
    sharded.divide_gradients(scale_);
    if (++good_steps_ == options_.growth_interval) {
      if (std::isfinite(scale_ * options_.growth)) scale_ *= options_.growth;
      good_steps_ = 0;
    }
    return true;
  }
  sharded.skip_step();
  scale_ = std::max(options_.scale_min, scale_ * options_.backoff);
  good_steps_ = 0;
  return false;
}

}  // namespace shardproof
