#include <ATen/ATen.h>

#include <cmath>

#include "shardproof/base/check.h"
#include "shardproof/base/dtypes.h"
#include "shardproof/device/device.h"
#include "shardproof/optim/optimizer.h"

namespace shardproof {
namespace {

void require_in(const char* rule, const char* what, double value, double low, double high) {
  SHARD_REQUIRE(value >= low && value < high, "optimizer", "{}: {} must be in [{}, {}), got {}", rule, what, low, high, value);
}

void require_rates(const char* rule, double lr, double weight_decay) {
  require_in(rule, "lr", lr, 0, INFINITY);
  require_in(rule, "weight_decay", weight_decay, 0, INFINITY);
}

template <class Options>
void require_betas(const char* rule, const Options& options) {
  require_in(rule, "beta1", options.beta1, 0, 1);
  require_in(rule, "beta2", options.beta2, 0, 1);
}

UpdateArrays arrays_of(const Update& update, const at::Tensor& rounded) {
  UpdateArrays arrays{.type = element_type(update.parameter.scalar_type()),
                      .parameter = update.parameter.mutable_data_ptr(),
                      .gradient = update.gradient.const_data_ptr(),
                      .count = update.parameter.numel()};
  if (!update.state.empty()) arrays.first = update.state[0].mutable_data_ptr();
  if (update.state.size() > 1) arrays.second = update.state[1].mutable_data_ptr();
  if (rounded.defined()) {
    arrays.low = rounded.mutable_data_ptr();
    arrays.low_type = element_type(rounded.scalar_type());
  }
  return arrays;
}

// In the dtype of the parameter; low precision is computed in float32 and rounded at the end.
// `run(const DeviceMath&, const UpdateArrays&)` is the rule.
template <class Run>
void in_wide(const Update& update, const Run& run) {
  const at::ScalarType dtype = update.parameter.scalar_type();
  if (dtype == at::kFloat || dtype == at::kDouble) return run(device_math(update.parameter), arrays_of(update, {}));
  Update wide{update.name, update.shape, update.parameter.to(at::kFloat), update.gradient.to(at::kFloat), {}, update.step,
              update.lr_factor, update.decay_factor};
  for (const at::Tensor& state : update.state) wide.state.push_back(state.to(at::kFloat));
  run(device_math(wide.parameter), arrays_of(wide, {}));
  update.parameter.copy_(wide.parameter);
  for (size_t i = 0; i < update.state.size(); ++i) update.state[i].copy_(wide.state[i]);
}

class Sgd final : public UpdateRule {
 public:
  explicit Sgd(const SgdOptions& options) : options_(options) {
    require_rates("sgd", options.lr, options.weight_decay);
    require_in("sgd", "momentum", options.momentum, 0, INFINITY);
    SHARD_REQUIRE(!options.nesterov || options.momentum != 0, "optimizer", "sgd: nesterov needs a momentum above 0");
  }

  std::vector<std::string> state_names() const override {
    return options_.momentum != 0 ? std::vector<std::string>{"momentum_buffer"} : std::vector<std::string>{};
  }

  std::vector<Setting> settings() const override {
    return {{"lr", options_.lr},           {"momentum", options_.momentum},
            {"dampening", 0.0},            {"weight_decay", options_.weight_decay},
            {"nesterov", options_.nesterov}, {"maximize", false},
            {"foreach", std::monostate()}, {"differentiable", false},
            {"fused", std::monostate()}};
  }

  void update(const Update& u) const override {
    in_wide(u, [&](const DeviceMath& math, const UpdateArrays& arrays) {
      math.sgd({.lr = options_.lr * u.lr_factor,
                .decay = options_.weight_decay * u.decay_factor,
                .momentum = options_.momentum,
                .nesterov = options_.nesterov}, arrays);
    });
  }

 private:
  SgdOptions options_;
};

// Adam with decay of the parameter or in the gradient.
class AdamRule final : public UpdateRule {
 public:
  AdamRule(const AdamWOptions& options, bool decoupled) : options_(options), decoupled_(decoupled) {
    const char* name = decoupled ? "adamw" : "adam";
    require_rates(name, options.lr, options.weight_decay);
    require_betas(name, options);
    require_in(name, "eps", options.eps, 0, INFINITY);
  }

  std::vector<std::string> state_names() const override { return {"exp_avg", "exp_avg_sq"}; }

  std::vector<Setting> settings() const override {
    return {{"lr", options_.lr},
            {"betas", std::vector<double>{options_.beta1, options_.beta2}},
            {"eps", options_.eps},
            {"weight_decay", options_.weight_decay},
            {"amsgrad", false},
            {"maximize", false},
            {"foreach", std::monostate()},
            {"capturable", false},
            {"differentiable", false},
            {"fused", std::monostate()},
            {"decoupled_weight_decay", decoupled_}};
  }

  void update(const Update& u) const override {
    in_wide(u, [&](const DeviceMath& math, const UpdateArrays& arrays) { math.adam(scalars(u), arrays); });
  }

  bool update_and_round(const Update& u, const at::Tensor& rounded) const override {
    if (u.parameter.scalar_type() != at::kFloat || rounded.element_size() != 2) return false;
    device_math(u.parameter).adam(scalars(u), arrays_of(u, rounded));
    return true;
  }

 private:
  AdamScalars scalars(const Update& u) const {
    const double lr = options_.lr * u.lr_factor, weight_decay = options_.weight_decay * u.decay_factor;
    const auto t = static_cast<double>(u.step);
    return {.keep = decoupled_ ? 1 - lr * weight_decay : 1,
            .coupled = decoupled_ ? 0 : weight_decay,
            .beta1 = options_.beta1,
            .beta1_rest = 1 - options_.beta1,
            .beta2 = options_.beta2,
            .beta2_rest = 1 - options_.beta2,
            .eps = options_.eps,
            .rate = lr / (1 - std::pow(options_.beta1, t)),
            .root = std::sqrt(1 - std::pow(options_.beta2, t))};
  }

  AdamWOptions options_;
  bool decoupled_;
};

class Lion final : public UpdateRule {
 public:
  explicit Lion(const LionOptions& options) : options_(options) {
    require_rates("lion", options.lr, options.weight_decay);
    require_betas("lion", options);
  }

  std::vector<std::string> state_names() const override { return {"exp_avg"}; }

  std::vector<Setting> settings() const override {
    return {{"lr", options_.lr},
            {"betas", std::vector<double>{options_.beta1, options_.beta2}},
            {"weight_decay", options_.weight_decay}};
  }

  void update(const Update& u) const override {
    const double lr = options_.lr * u.lr_factor;
    in_wide(u, [&](const DeviceMath& math, const UpdateArrays& arrays) {
      math.lion({.keep = 1 - lr * options_.weight_decay * u.decay_factor,
                 .lr = lr,
                 .beta1 = options_.beta1,
                 .beta1_rest = 1 - options_.beta1,
                 .beta2 = options_.beta2,
                 .beta2_rest = 1 - options_.beta2}, arrays);
    });
  }

 private:
  LionOptions options_;
};

}  // namespace

std::shared_ptr<UpdateRule> make_rule(const SgdOptions& options) { return std::make_shared<Sgd>(options); }
std::shared_ptr<UpdateRule> make_rule(const AdamWOptions& options) { return std::make_shared<AdamRule>(options, true); }
std::shared_ptr<UpdateRule> make_rule(const AdamOptions& options) {
  return std::make_shared<AdamRule>(AdamWOptions{options.lr, options.beta1, options.beta2, options.eps, options.weight_decay},
                                    false);
}
std::shared_ptr<UpdateRule> make_rule(const LionOptions& options) { return std::make_shared<Lion>(options); }

}  // namespace shardproof
