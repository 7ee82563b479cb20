#include <ATen/ATen.h>

#include <cmath>
#include <span>

#include "shardproof/base/check.h"
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

// One element after the other: parameter, gradient and up to two states. `Rule::apply<Real>(p, g, m, v)` is the whole rule.
template <class Real, class Kernel>
void run(const Update& update, const Kernel& kernel) {
  Real* __restrict p = update.parameter.mutable_data_ptr<Real>();
  const Real* __restrict g = update.gradient.const_data_ptr<Real>();
  Real* __restrict m = !update.state.empty() ? update.state[0].mutable_data_ptr<Real>() : nullptr;
  Real* __restrict v = update.state.size() > 1 ? update.state[1].mutable_data_ptr<Real>() : nullptr;
  kernel(p, g, m, v, update.parameter.numel());
}

UpdateArrays arrays_of(const Update& update, const at::Tensor& rounded) {
  UpdateArrays arrays{.parameter = update.parameter.mutable_data_ptr<float>(),
                      .gradient = update.gradient.const_data_ptr<float>(),
                      .count = update.parameter.numel()};
  if (!update.state.empty()) arrays.first = update.state[0].mutable_data_ptr<float>();
  if (update.state.size() > 1) arrays.second = update.state[1].mutable_data_ptr<float>();
  if (rounded.defined()) {
    arrays.low = rounded.mutable_data_ptr();
    arrays.low_type = element_type(rounded.scalar_type());
  }
  return arrays;
}

// In the dtype of the parameter; low precision is computed in float32 and rounded at the end.
template <class MakeKernel, class OnDevice>
void dispatch(const Update& update, const MakeKernel& make, const OnDevice& on_device) {
  const DeviceMath* math = device_math(update.parameter);
  if (update.parameter.scalar_type() == at::kFloat)
    return math ? on_device(*math, arrays_of(update, {})) : run<float>(update, make(float{}));
  if (update.parameter.scalar_type() == at::kDouble) {
    SHARD_REQUIRE(update.parameter.is_cpu(), "optimizer",
                  "parameter {} is float64 on {}, and devices update float32. Set Precision::main to float32", update.name,
                  update.parameter.device().str());
    return run<double>(update, make(double{}));
  }
  Update wide{update.name, update.shape, update.parameter.to(at::kFloat), update.gradient.to(at::kFloat), {}, update.step,
              update.lr_factor, update.decay_factor};
  for (const at::Tensor& state : update.state) wide.state.push_back(state.to(at::kFloat));
  dispatch(wide, make, on_device);
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

  std::vector<std::string> slots() const override {
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
    dispatch(u, [&]<class Real>(Real) {
      return
          [lr = static_cast<Real>(options_.lr * u.lr_factor), decay = static_cast<Real>(options_.weight_decay * u.decay_factor),
           momentum = static_cast<Real>(options_.momentum), nesterov = options_.nesterov](
              Real* __restrict p, const Real* __restrict g, Real* __restrict m, Real*, int64_t count) {
            for (int64_t i = 0; i < count; ++i) {
              Real direction = g[i];
              if (decay != 0) direction += decay * p[i];
              if (m) {
                m[i] = momentum * m[i] + direction;
                direction = nesterov ? direction + momentum * m[i] : m[i];
              }
              p[i] -= lr * direction;
            }
          };
    }, [&](const DeviceMath& math, const UpdateArrays& arrays) {
      math.sgd({.lr = static_cast<float>(options_.lr * u.lr_factor),
                .decay = static_cast<float>(options_.weight_decay * u.decay_factor),
                .momentum = static_cast<float>(options_.momentum),
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

  std::vector<std::string> slots() const override { return {"exp_avg", "exp_avg_sq"}; }

  std::vector<Setting> settings() const override {
    return {{"lr", options_.lr},
            {"betas", std::pair(options_.beta1, options_.beta2)},
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
    dispatch(u, [&]<class Real>(Real) {
      return [s = scalars<Real>(u)](Real* __restrict p, const Real* __restrict g, Real* __restrict m, Real* __restrict v,
                                    int64_t count) {
        for (int64_t i = 0; i < count; ++i) {
          const Real gradient = s.coupled != 0 ? g[i] + s.coupled * p[i] : g[i];
          const Real decayed = p[i] * s.keep;
          m[i] = s.beta1 * m[i] + s.beta1_rest * gradient;
          v[i] = s.beta2 * v[i] + s.beta2_rest * (gradient * gradient);
          p[i] = decayed - s.rate * (m[i] / (std::sqrt(v[i]) / s.root + s.eps));
        }
      };
    }, [&](const DeviceMath& math, const UpdateArrays& arrays) { on_device(math, u, arrays); });
  }

  bool update_and_round(const Update& u, const at::Tensor& rounded) const override {
    const DeviceMath* math = device_math(u.parameter);
    if (!math || u.parameter.scalar_type() != at::kFloat || rounded.element_size() != 2) return false;
    on_device(*math, u, arrays_of(u, rounded));
    return true;
  }

 private:
  // In double, each rounded once.
  template <class Real>
  struct Scalars {
    Real keep, coupled, beta1, beta1_rest, beta2, beta2_rest, eps, rate, root;
  };
  template <class Real>
  Scalars<Real> scalars(const Update& u) const {
    const double lr = options_.lr * u.lr_factor, weight_decay = options_.weight_decay * u.decay_factor;
    const auto t = static_cast<double>(u.step);
    return {.keep = static_cast<Real>(decoupled_ ? 1 - lr * weight_decay : 1),
            .coupled = static_cast<Real>(decoupled_ ? 0 : weight_decay),
            .beta1 = static_cast<Real>(options_.beta1),
            .beta1_rest = static_cast<Real>(1 - options_.beta1),
            .beta2 = static_cast<Real>(options_.beta2),
            .beta2_rest = static_cast<Real>(1 - options_.beta2),
            .eps = static_cast<Real>(options_.eps),
            .rate = static_cast<Real>(lr / (1 - std::pow(options_.beta1, t))),
            .root = static_cast<Real>(std::sqrt(1 - std::pow(options_.beta2, t)))};
  }
  void on_device(const DeviceMath& math, const Update& u, const UpdateArrays& arrays) const {
    const auto s = scalars<float>(u);
    math.adam({s.keep, s.coupled, s.beta1, s.beta1_rest, s.beta2, s.beta2_rest, s.eps, s.rate, s.root}, arrays);
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

  std::vector<std::string> slots() const override { return {"exp_avg"}; }

  std::vector<Setting> settings() const override {
    return {{"lr", options_.lr}, {"betas", std::pair(options_.beta1, options_.beta2)}, {"weight_decay", options_.weight_decay}};
  }

  void update(const Update& u) const override {
    const double lr = options_.lr * u.lr_factor;
    dispatch(u, [&]<class Real>(Real) {
      return [keep = static_cast<Real>(1 - lr * options_.weight_decay * u.decay_factor), lr = static_cast<Real>(lr),
              beta1 = static_cast<Real>(options_.beta1), beta1_rest = static_cast<Real>(1 - options_.beta1),
              beta2 = static_cast<Real>(options_.beta2), beta2_rest = static_cast<Real>(1 - options_.beta2)](
                 Real* __restrict p, const Real* __restrict g, Real* __restrict m, Real*, int64_t count) {
        for (int64_t i = 0; i < count; ++i) {
          const Real decayed = p[i] * keep;
          const Real blend = beta1 * m[i] + beta1_rest * g[i];
          const Real sign = blend > 0 ? Real{1} : blend < 0 ? Real{-1} : blend;
          m[i] = beta2 * m[i] + beta2_rest * g[i];
          p[i] = decayed - lr * sign;
        }
      };
    }, [&](const DeviceMath& math, const UpdateArrays& arrays) {
      math.lion({.keep = static_cast<float>(1 - lr * options_.weight_decay * u.decay_factor),
                 .lr = static_cast<float>(lr),
                 .beta1 = static_cast<float>(options_.beta1),
                 .beta1_rest = static_cast<float>(1 - options_.beta1),
                 .beta2 = static_cast<float>(options_.beta2),
                 .beta2_rest = static_cast<float>(1 - options_.beta2)}, arrays);
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
