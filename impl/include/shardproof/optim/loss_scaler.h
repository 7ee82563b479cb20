// Dynamic loss scaling for float16 (Micikevicius et al. 2018, "Mixed Precision Training"). Small gradients would vanish in
// float16, so the loss is scaled up and the gradient is scaled down again. All ranks decide alike whether to skip a step. Use
// it with ShardOptions::check_gradients = false.
//
//   scaler.scale(loss).backward();
//   if (scaler.unscale(sharded)) { sharded.clip_gradients(1.0); optimizer.step(); }
//
// It works as torch.amp.GradScaler does, on sharded gradients and with one decision for the whole mesh.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "shardproof/sharding/fully_shard.h"

namespace shardproof {

struct LossScalerOptions {
  double initial = 65536;
  double growth = 2;
  double backoff = 0.5;
  int64_t growth_interval = 2000;  // the scale grows after so many steps in a row without overflow
  double scale_min = 1.0 / 16384;
};

class LossScaler {
 public:
  // Throws Error when a factor is out of range.
  explicit LossScaler(LossScalerOptions options);

  double value() const { return scale_; }
  // What a resumed run needs to go on with the same scales.
  struct State {
    double scale = 0;
    int64_t good_steps = 0;  // the number of steps in a row without overflow
    bool operator==(const State&) const = default;
  };
  State state() const { return {scale_, good_steps_}; }
  // Throws Error when the state is out of range.
  void set_state(const State& state);

  at::Tensor scale(const at::Tensor& loss) const;

  // Call it after the last backward of a step. When all gradients on all ranks are finite, it divides them by the scale and
  // returns true. Otherwise it drops them (Sharded::skip_step), lowers the scale and returns false. Collective over the mesh.
  bool unscale(Sharded& sharded);

 private:
  LossScalerOptions options_;
  double scale_;
  int64_t good_steps_ = 0;
};

}  // namespace shardproof
