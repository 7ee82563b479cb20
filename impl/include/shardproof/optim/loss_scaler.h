// Dynamic loss scaling for float16: small gradients would vanish, so the loss is scaled up and the gradient down again. The
// decision to skip a step is the same on every rank. Use it with ShardOptions::check_gradients = false.
//
//   scaler.scale(loss).backward();
//   if (scaler.unscale(sharded)) { sharded.clip_gradients(1.0); optimizer.step(); }
//
// As torch.amp.GradScaler over sharded gradients, with one flag over the whole mesh.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "shardproof/sharding/fully_shard.h"

namespace shardproof {

struct LossScalerOptions {
  double initial = 65536;
  double growth = 2;
  double backoff = 0.5;
  int64_t growth_interval = 2000;  // steps in a row without overflow
  double scale_min = 1.0 / 16384;
};

class LossScaler {
 public:
  // Throws Error when a factor is out of range.
  explicit LossScaler(LossScalerOptions options);

  double value() const { return scale_; }
  // What a resumed run needs.
  struct State {
    double scale = 0;
    int64_t good_steps = 0;  // in a row
    bool operator==(const State&) const = default;
  };
  State state() const { return {scale_, good_steps_}; }
  // Throws Error when it is out of range.
  void set_state(const State& state);

  at::Tensor scale(const at::Tensor& loss) const;

  // After the last backward: divides gradients by the scale and returns true; or, when an element on any rank is NaN or
  // infinite, forgets them (Sharded::skip_step), lowers the scale and returns false. Collective over the mesh.
  bool unscale(Sharded& sharded);

 private:
  LossScalerOptions options_;
  double scale_;
  int64_t good_steps_ = 0;
};

}  // namespace shardproof
