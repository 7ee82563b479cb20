// Elementwise optimizers on the shards that a rank owns. Every element sees the same IEEE operations in the same order
// wherever it lies, so results do not depend on the cut. Scalars are computed in double and rounded once to the dtype.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "shardproof/fully_shard.h"

namespace shardproof {

//   g += weight_decay * p (if not 0);  m = momentum * m + g, d = m (d = g without momentum);  p -= lr * d
// As torch.optim.SGD with dampening 0; state "momentum_buffer" when momentum is not 0.
struct SgdOptions {
  double lr = 0.1;
  double momentum = 0;
  double weight_decay = 0;
};

//   p *= 1 - lr * weight_decay;  m = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) * (g * g);
//   p -= (lr / (1 - beta1^t)) * (m / (sqrt(v) / sqrt(1 - beta2^t) + eps))
// As torch.optim.AdamW up to rounding; state "exp_avg", "exp_avg_sq".
struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;
};

// One elementwise rule. A new optimizer is a subclass.
class UpdateRule {
 public:
  virtual ~UpdateRule() = default;
  // Names of the state tensors, each of the parameter's shape, starting at zero.
  virtual std::vector<std::string> slots() const = 0;
  // Updates elements in place; all spans have the same length. `step` counts from 1.
  virtual void update(std::span<float> parameter, std::span<const float> gradient, const std::vector<std::span<float>>& state,
                      int64_t step) const = 0;
};
std::unique_ptr<UpdateRule> make_rule(const SgdOptions& options);
std::unique_ptr<UpdateRule> make_rule(const AdamWOptions& options);

class Optimizer {
 public:
  // State is allocated here, for the owned shards only. `sharded` must outlive the optimizer.
  Optimizer(Sharded& sharded, std::unique_ptr<UpdateRule> rule);

  // Updates the owned shards, publishes them, forgets the gradients. Collective; after the last backward, else an Error.
  void step();

  std::vector<std::string> slots() const { return rule_->slots(); }
  // What this rank holds of one slot, in the strategy's `state` layout.
  std::vector<Piece> state(const std::string& slot) const;

 private:
  Sharded& sharded_;
  std::unique_ptr<UpdateRule> rule_;
  std::vector<std::vector<at::Tensor>> state_;  // [bucket][slot]
};

inline Optimizer sgd(Sharded& sharded, const SgdOptions& options) { return {sharded, make_rule(options)}; }
inline Optimizer adamw(Sharded& sharded, const AdamWOptions& options) { return {sharded, make_rule(options)}; }

}  // namespace shardproof
