// Optimizers on the shards that a rank owns. Elementwise rules see the same IEEE operations in the same order wherever an
// element lies, so results do not depend on the cut. Scalars are computed in double and rounded once to the dtype of the
// arithmetic: float32, or float64 for float64 parameters; low-precision parameters without main parameters are rounded after
// each update.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "shardproof/sharding/fully_shard.h"

namespace shardproof {

//   g += weight_decay * p (if not 0);  m = momentum * m + g, d = m (d = g without momentum; d = g + momentum * m with
//   nesterov); p -= lr * d
// As torch.optim.SGD with dampening 0; state "momentum_buffer" when momentum is not 0.
struct SgdOptions {
  double lr = 0.1;
  double momentum = 0;
  bool nesterov = false;
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

// As AdamW, with decay in the gradient instead: g += weight_decay * p. As torch.optim.Adam up to rounding.
struct AdamOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
};

//   p *= 1 - lr * weight_decay;  u = sign(beta1 * m + (1 - beta1) * g);  m = beta2 * m + (1 - beta2) * g;  p -= lr * u
// Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms"; state "exp_avg".
struct LionOptions {
  double lr = 1e-4;
  double beta1 = 0.9;
  double beta2 = 0.99;
  double weight_decay = 0;
};

// For matrices, held whole (Granularity::tensor):
//   p *= 1 - lr * weight_decay;  m = momentum * m + (1 - momentum) * g;  u = (1 - momentum) * g + momentum * m;
//   p -= lr * sqrt(max(1, rows / columns)) * orth(u)
// where orth is five Newton-Schulz steps towards the nearest orthogonal matrix (Jordan 2024, "Muon"); state "momentum_buffer".
// As torch.optim.Muon with nesterov and the "original" adjustment of lr, but for the steps of orth: PyTorch takes them in
// bfloat16, and here they are in float32.
struct MuonOptions {
  double lr = 0.02;
  double momentum = 0.95;
  double weight_decay = 0;
};

// One update of one run of a parameter's elements.
struct Update {
  const std::string& name;
  const Shape& shape;                // of the whole parameter
  at::Tensor parameter;              // 1-D, the elements of the run, updated in place
  at::Tensor gradient;               // the same elements, the same dtype
  std::vector<at::Tensor> state;     // one for each slot, the same elements and dtype, starting at zero
  int64_t step = 1;                  // updates of this parameter, counted from 1
  double lr_factor = 1;              // of schedule and group
  double decay_factor = 1;
};

// A setting by its name; nothing is Python's None, and a vector is a tuple of floats.
using Setting = std::pair<std::string, std::variant<std::monostate, bool, int64_t, double, std::vector<double>>>;

// A new optimizer is a subclass.
class UpdateRule {
 public:
  virtual ~UpdateRule() = default;
  // Names of the state tensors.
  virtual std::vector<std::string> slots() const = 0;
  // Whether runs must be whole parameters.
  virtual bool needs_whole_parameters() const { return false; }
  // What PyTorch's optimizer of this kind has in its param_groups, so that it reads our checkpoints. A rule without a
  // counterpart in PyTorch gives its own numbers; the default gives none.
  virtual std::vector<Setting> settings() const { return {}; }
  // May depend on its arguments alone.
  virtual void update(const Update& update) const = 0;
  // The same, and besides writes the new parameter to `rounded`, rounded once to its dtype, while it is at hand. False: nothing
  // was done, because this rule does not do both at once there.
  virtual bool update_and_round(const Update& update, const at::Tensor& rounded) const { return false; }
};
std::shared_ptr<UpdateRule> make_rule(const SgdOptions& options);
std::shared_ptr<UpdateRule> make_rule(const AdamWOptions& options);
std::shared_ptr<UpdateRule> make_rule(const AdamOptions& options);
std::shared_ptr<UpdateRule> make_rule(const LionOptions& options);
std::shared_ptr<UpdateRule> make_rule(const MuonOptions& options);

// Which parameters a rule updates, and how its rate and decay change for them.
struct ParameterGroup {
  std::function<bool(const std::string& name, const Shape& shape)> takes = {};  // empty: all that no group before takes
  std::shared_ptr<UpdateRule> rule;
  double lr_factor = 1;
  double decay_factor = 1;
};

// The usual two groups: parameters of fewer than two dims (biases and norms) and those with "norm" or "ln_" in their name are
// not decayed.
std::vector<ParameterGroup> without_decay_of_norms_and_biases(std::shared_ptr<UpdateRule> rule);

class Optimizer {
 public:
  // State is allocated here, for the owned shards of parameters that require gradients; for one that does so later, at its
  // first update. The Sharded may be moved; once it is destroyed, every call here is an Error. Throws Error, naming the
  // parameter, when no group takes one, or when a rule needs whole parameters and the shards cut one.
  Optimizer(Sharded& sharded, std::vector<ParameterGroup> groups);
  Optimizer(Sharded& sharded, std::shared_ptr<UpdateRule> rule);

  // Updates the owned shards, publishes them, forgets the gradients. Collective; after the last backward, else an Error.
  void step();

  // Multiplies every rate from the next step on. See lr_schedule.h.
  void set_lr_factor(double factor);

  // Of all groups, each name once.
  std::vector<std::string> slots() const;
  // What this rank holds of one slot, in the strategy's `state` layout and the main dtype, of parameters that have it.
  std::vector<Piece> state(const std::string& slot) const;
  // Updates of a parameter so far. Throws Error for an unknown one.
  int64_t updates(const std::string& parameter) const;

  // For checkpoints. Groups with the parameters that they took, in order; those without any are left out.
  struct Group {
    std::vector<std::string> parameters;
    std::vector<std::string> slots;
    std::vector<Setting> settings;  // rates and decays times the factors of now
  };
  std::vector<Group> groups() const;
  // After `updates` updates: with state (zero where there was none; this rank's part of it), or without.
  void restore(const std::string& parameter, int64_t updates, bool with_state);

 private:
  // State of one run of a parameter.
  struct Held {
    int64_t group = 0;
    int64_t updates = 0;  // the same on every rank, whether it owns a part or not
    std::vector<at::Tensor> state;  // empty until the parameter is trained and this rank owns a part of it
  };
  void allocate_state(size_t bucket, size_t slot);
  // Whether the parameters in the compute dtype are up to date as well.
  bool update_bucket(size_t index);

  // Throws Error when it is gone.
  std::shared_ptr<Sharded::Impl> sharded() const;

  std::weak_ptr<Sharded::Impl> sharded_;
  std::vector<ParameterGroup> groups_;
  double lr_factor_ = 1;
  std::vector<std::vector<Held>> held_;  // [bucket][slot]
};

inline Optimizer sgd(Sharded& sharded, const SgdOptions& options) { return {sharded, make_rule(options)}; }
inline Optimizer adam(Sharded& sharded, const AdamOptions& options) { return {sharded, make_rule(options)}; }
inline Optimizer adamw(Sharded& sharded, const AdamWOptions& options) { return {sharded, make_rule(options)}; }
inline Optimizer lion(Sharded& sharded, const LionOptions& options) { return {sharded, make_rule(options)}; }
// Matrices by Muon, the rest by AdamW.
Optimizer muon(Sharded& sharded, const MuonOptions& options, const AdamWOptions& others);

}  // namespace shardproof
