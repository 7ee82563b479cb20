// Optimizers that update the shards that a rank owns. An elementwise rule performs the same IEEE operations in the same order
// on every element, wherever it lies, so results do not depend on how parameters are cut. Scalars are computed in double and
// rounded once to the dtype of the arithmetic, which is float32, or float64 for float64 parameters. Low-precision parameters
// without main parameters are rounded after each update.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "shardproof/optim/optimizer_state.h"
#include "shardproof/sharding/fully_shard.h"

namespace shardproof {

//   g += weight_decay * p (unless weight_decay is 0);  m = momentum * m + g;  p -= lr * d
// where d is m; without momentum it is g, and with nesterov it is g + momentum * m. It equals torch.optim.SGD with dampening 0.
// The state is "momentum_buffer", and empty when momentum is 0.
struct SgdOptions {
  double lr = 0.1;
  double momentum = 0;
  bool nesterov = false;
  double weight_decay = 0;
};

//   p *= 1 - lr * weight_decay;  m = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) * (g * g);
//   p -= (lr / (1 - beta1^t)) * (m / (sqrt(v) / sqrt(1 - beta2^t) + eps))
// It equals torch.optim.AdamW up to rounding (Loshchilov and Hutter 2019). The state is "exp_avg" and "exp_avg_sq".
struct AdamWOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;
};

// AdamW with the decay in the gradient instead: g += weight_decay * p. It equals torch.optim.Adam up to rounding (Kingma and Ba
// 2015). The state is that of AdamW.
struct AdamOptions {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0;
};

//   p *= 1 - lr * weight_decay;  u = sign(beta1 * m + (1 - beta1) * g);  m = beta2 * m + (1 - beta2) * g;  p -= lr * u
// This is Lion of Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms". The state is "exp_avg".
struct LionOptions {
  double lr = 1e-4;
  double beta1 = 0.9;
  double beta2 = 0.99;
  double weight_decay = 0;
};

// For matrices that lie whole on one rank (Granularity::tensor):
//   p *= 1 - lr * weight_decay;  m = momentum * m + (1 - momentum) * g;  u = (1 - momentum) * g + momentum * m;
//   p -= lr * sqrt(max(1, rows / columns)) * orth(u)
// where orth takes five Newton-Schulz steps towards the nearest orthogonal matrix (Jordan 2024, "Muon"). It equals
// torch.optim.Muon with nesterov and the "original" adjustment of lr, except that PyTorch takes the steps of orth in bfloat16
// and this rule takes them in float32. The state is "momentum_buffer".
struct MuonOptions {
  double lr = 0.02;
  double momentum = 0.95;
  double weight_decay = 0;
};

// One update of one run of a parameter's elements.
struct Update {
  const std::string& name;
  const Shape& shape;                // the shape of the whole parameter
  at::Tensor parameter;              // 1-D: the elements of the run, which are updated in place
  at::Tensor gradient;               // the same elements in the same dtype
  std::vector<at::Tensor> state;     // for each state tensor the same elements in the same dtype; zeros at first
  int64_t step = 1;                  // the number of this update of the parameter, counted from 1
  double lr_factor = 1;              // the product of the schedule's and the group's factor
  double decay_factor = 1;
};

// The rule by which an optimizer updates a parameter. For a new optimizer, derive a class.
class UpdateRule {
 public:
  virtual ~UpdateRule() = default;
  // Names of the state tensors.
  virtual std::vector<std::string> state_names() const = 0;
  // Whether the rule works on whole parameters only.
  virtual bool needs_whole_parameters() const { return false; }
  // What PyTorch's optimizer of this kind has in its param_groups, so that it can read our checkpoints. A rule that PyTorch
  // does not have returns its own numbers. The default returns none.
  virtual std::vector<Setting> settings() const { return {}; }
  // Updates the parameter and the state. The result must depend on the argument alone.
  virtual void update(const Update& update) const = 0;
  // Does the same, and also writes the new parameter to `rounded`, rounded once to its dtype. Returns false when it did
  // nothing, because this rule cannot do both at once there.
  virtual bool update_and_round(const Update& update, const at::Tensor& rounded) const { return false; }
};
std::shared_ptr<UpdateRule> make_rule(const SgdOptions& options);
std::shared_ptr<UpdateRule> make_rule(const AdamWOptions& options);
std::shared_ptr<UpdateRule> make_rule(const AdamOptions& options);
std::shared_ptr<UpdateRule> make_rule(const LionOptions& options);
std::shared_ptr<UpdateRule> make_rule(const MuonOptions& options);

// Which parameters a rule updates, and how its rate and decay change for them.
struct ParameterGroup {
  std::function<bool(const std::string& name, const Shape& shape)> takes = {};  // empty: takes all that earlier groups do not
  std::shared_ptr<UpdateRule> rule;
  double lr_factor = 1;
  double decay_factor = 1;
};

// The usual two groups. Parameters of fewer than two dims (biases and norms), and those with "norm" or "ln_" in their name, are
// not decayed. All others are.
std::vector<ParameterGroup> without_decay_of_norms_and_biases(std::shared_ptr<UpdateRule> rule);

class Optimizer : public OptimizerState {
 public:
  // Allocates the state for this rank's shards of all parameters that require gradients. A parameter that requires them only
  // later gets its state at its first update. The Sharded may be moved. Once it is destroyed, every call here throws Error.
  // Throws Error, which names the parameter, when no group takes it, or when its rule needs whole parameters and the shards cut
  // it. Every rank makes its own, with the same groups. It does not communicate.
  Optimizer(Sharded& sharded, std::vector<ParameterGroup> groups);
  Optimizer(Sharded& sharded, std::shared_ptr<UpdateRule> rule);

  // Updates this rank's shards, brings the parameters up to date on all ranks (an all-gather where the strategy needs one), and
  // drops the gradients. Throws Error before the last backward of the step, and while averages are in the place of the
  // parameters (ema.h). Collective over the mesh.
  void step();

  // Sets the factor that multiplies every learning rate from the next step on (lr_schedule.h). Every rank passes the same one.
  // It does not communicate. Throws Error when it is negative.
  void set_lr_factor(double factor);

  // The names of all groups' state tensors, each once.
  std::vector<std::string> state_names() const override;
  // What this rank holds of one state tensor, in the strategy's `state` layout and the main dtype, for the parameters that have
  // it. Local, like all below that does not say otherwise.
  std::vector<Piece> state(const std::string& state_name) const;
  // The same as shards, one of each parameter that has this state, whether this rank holds a part of it or not.
  std::vector<Shard> state_shards(const std::string& state_name) const override;
  // Whole state by the parameter's name, on every rank, in the main dtype. Throws Error inside a backward, or, with a near
  // name, when no group has this state. Collective over the mesh.
  std::map<std::string, at::Tensor> gather_state(const std::string& state_name) const;
  // That of one parameter, as Sharded::gather_main_parameter gives the parameter.
  at::Tensor gather_state(const std::string& state_name, const std::string& parameter) const;
  // Writes whole values into the state of parameters that have it, as Sharded::write_parameters does. Collective over the mesh.
  void write_state(const std::string& state_name, const std::map<std::string, at::Tensor>& values);
  // How often a parameter has been updated so far. Throws Error when there is no such parameter.
  int64_t updates(const std::string& parameter) const override;

  // Rates and decays are multiplied by the present factors. A group that took no parameter is left out.
  std::vector<Group> groups() const override;
  // "step", the number of updates, of parameters with Adam's state, as PyTorch's optimizer has it.
  std::vector<Scalar> scalars() const override;
  // State that was not there is zeros.
  void restore(const std::string& parameter, int64_t updates, bool with_state) override;
  bool replace_state(const std::string& parameter, const std::string& state_name, at::Tensor values) override;

 private:
  // The state of one run of a parameter.
  struct Held {
    int64_t group = 0;
    int64_t updates = 0;                 // this and the next are the same on every rank, whether it owns a part or not
    bool has_state = false;              // the parameter trains or was restored with state
    std::vector<at::Tensor> state = {};  // of what this rank owns of it; empty where it owns nothing
  };
  void allocate_state(size_t bucket, size_t member);
  // Returns whether the parameters in the compute dtype are up to date too.
  bool update_bucket(size_t index);

  // Throws Error when the Sharded is gone.
  std::shared_ptr<Sharded::Impl> sharded() const;

  std::weak_ptr<Sharded::Impl> sharded_;
  std::vector<ParameterGroup> groups_;
  double lr_factor_ = 1;
  std::vector<std::vector<Held>> held_;  // [bucket][member]
};

inline Optimizer sgd(Sharded& sharded, const SgdOptions& options) { return {sharded, make_rule(options)}; }
inline Optimizer adam(Sharded& sharded, const AdamOptions& options) { return {sharded, make_rule(options)}; }
inline Optimizer adamw(Sharded& sharded, const AdamWOptions& options) { return {sharded, make_rule(options)}; }
inline Optimizer lion(Sharded& sharded, const LionOptions& options) { return {sharded, make_rule(options)}; }
// Updates matrices by Muon and all other parameters by AdamW.
Optimizer muon(Sharded& sharded, const MuonOptions& options, const AdamWOptions& others);

}  // namespace shardproof
