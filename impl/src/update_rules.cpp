#include <cmath>

#include "shardproof/check.h"
#include "shardproof/optimizer.h"

namespace shardproof {
namespace {

void require_in(const char* rule, const char* what, double value, double low, double high) {
  SHARD_REQUIRE(value >= low && value < high, "optimizer", "{}: {} must be in [{}, {}), got {}", rule, what, low, high, value);
}

class Sgd final : public UpdateRule {
 public:
  explicit Sgd(const SgdOptions& options) : options_(options) {
    require_in("sgd", "lr", options.lr, 0, INFINITY);
    require_in("sgd", "momentum", options.momentum, 0, INFINITY);
    require_in("sgd", "weight_decay", options.weight_decay, 0, INFINITY);
  }

  std::vector<std::string> slots() const override {
    return options_.momentum != 0 ? std::vector<std::string>{"momentum_buffer"} : std::vector<std::string>{};
  }

  void update(std::span<float> parameter, std::span<const float> gradient, const std::vector<std::span<float>>& state,
              int64_t) const override {
    const auto lr = static_cast<float>(options_.lr);
    const auto decay = static_cast<float>(options_.weight_decay);
    const auto momentum = static_cast<float>(options_.momentum);
    float* __restrict p = parameter.data();
    const float* __restrict g = gradient.data();
    float* __restrict m = state.empty() ? nullptr : state[0].data();
    for (size_t i = 0; i < parameter.size(); ++i) {
      float direction = g[i];
      if (decay != 0) direction += decay * p[i];
      if (m) direction = m[i] = momentum * m[i] + direction;
      p[i] -= lr * direction;
    }
  }

 private:
  SgdOptions options_;
};

class AdamW final : public UpdateRule {
 public:
  explicit AdamW(const AdamWOptions& options) : options_(options) {
    require_in("adamw", "lr", options.lr, 0, INFINITY);
    require_in("adamw", "beta1", options.beta1, 0, 1);
    require_in("adamw", "beta2", options.beta2, 0, 1);
    require_in("adamw", "eps", options.eps, 0, INFINITY);
    require_in("adamw", "weight_decay", options.weight_decay, 0, INFINITY);
  }

  std::vector<std::string> slots() const override { return {"exp_avg", "exp_avg_sq"}; }

  void update(std::span<float> parameter, std::span<const float> gradient, const std::vector<std::span<float>>& state,
              int64_t step) const override {
    const auto keep = static_cast<float>(1 - options_.lr * options_.weight_decay);
    const auto beta1 = static_cast<float>(options_.beta1);
    const auto beta1_rest = static_cast<float>(1 - options_.beta1);
    const auto beta2 = static_cast<float>(options_.beta2);
    const auto beta2_rest = static_cast<float>(1 - options_.beta2);
    const auto eps = static_cast<float>(options_.eps);
    const auto rate = static_cast<float>(options_.lr / (1 - std::pow(options_.beta1, static_cast<double>(step))));
    const auto root = static_cast<float>(std::sqrt(1 - std::pow(options_.beta2, static_cast<double>(step))));
    float* __restrict p = parameter.data();
    const float* __restrict g = gradient.data();
    float* __restrict m = state[0].data();
    float* __restrict v = state[1].data();
    for (size_t i = 0; i < parameter.size(); ++i) {
      const float decayed = p[i] * keep;
      m[i] = beta1 * m[i] + beta1_rest * g[i];
      v[i] = beta2 * v[i] + beta2_rest * (g[i] * g[i]);
      p[i] = decayed - rate * (m[i] / (std::sqrt(v[i]) / root + eps));
    }
  }

 private:
  AdamWOptions options_;
};

}  // namespace

std::unique_ptr<UpdateRule> make_rule(const SgdOptions& options) { return std::make_unique<Sgd>(options); }
std::unique_ptr<UpdateRule> make_rule(const AdamWOptions& options) { return std::make_unique<AdamW>(options); }

}  // namespace shardproof
