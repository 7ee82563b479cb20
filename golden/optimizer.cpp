#include "golden/optimizer.h"

#include <ATen/ATen.h>

#include <cmath>

#include "golden/norm.h"
#include "golden/validate.h"

namespace golden {

namespace {

using Kind = Optimizer::Kind;

// at::sqrt of floats is a vector library's, one ulp off in a fifth of all values. The double root of a float is so close to
// exact that rounding it to float gives the correctly rounded root.
at::Tensor rounded_sqrt(const at::Tensor& values) {
  if (values.scalar_type() != at::kFloat) return values.sqrt();
  return values.to(at::kDouble).sqrt().to(at::kFloat);
}

std::vector<std::string> slots(const Optimizer& optimizer, bool by_muon) {
  if (by_muon) return {"momentum_buffer"};
  switch (optimizer.kind) {
    case Kind::sgd: return optimizer.momentum != 0 ? std::vector<std::string>{"momentum_buffer"} : std::vector<std::string>{};
    case Kind::lion: return {"exp_avg"};
    default: return {"exp_avg", "exp_avg_sq"};
  }
}

// What a step of one parameter needs to know.
struct Rates {
  const Optimizer& o;
  double lr, decay;
  double t;
};

at::Tensor sgd(const Rates& r, const at::Tensor& p, at::Tensor g, Named& state) {
  if (r.decay != 0) g = g + p * r.decay;
  if (r.o.momentum != 0) {
    at::Tensor& m = state[0].second;
    m = m * r.o.momentum + g;
    g = r.o.nesterov ? g + m * r.o.momentum : m;
  }
  return p - g * r.lr;
}

at::Tensor adam(const Rates& r, at::Tensor p, at::Tensor g, Named& state, bool decoupled) {
  const double step_size = r.lr / (1 - std::pow(r.o.beta1, r.t));
  const double root_correction = std::sqrt(1 - std::pow(r.o.beta2, r.t));
  if (decoupled) p = p * (1 - r.lr * r.decay);
  else if (r.decay != 0) g = g + p * r.decay;
  at::Tensor& m = state[0].second;
  at::Tensor& v = state[1].second;
  m = m * r.o.beta1 + g * (1 - r.o.beta1);
  v = v * r.o.beta2 + (g * g) * (1 - r.o.beta2);
  return p - (m / (rounded_sqrt(v) / root_correction + r.o.eps)) * step_size;
}

at::Tensor lion(const Rates& r, const at::Tensor& p, const at::Tensor& g, Named& state) {
  at::Tensor& m = state[0].second;
  const at::Tensor direction = (m * r.o.beta1 + g * (1 - r.o.beta1)).sign();
  m = m * r.o.beta2 + g * (1 - r.o.beta2);
  return p * (1 - r.lr * r.decay) - direction * r.lr;
}

// Five Newton-Schulz steps, as golden.h spells them.
at::Tensor orthogonalized(const at::Tensor& u) {
  constexpr double a = 3.4445, b = -4.7750, c = 2.0315;
  const double size = std::sqrt(sum_of_squares({u}));
  at::Tensor x = u / (at::scalar_tensor(size, u.scalar_type()) + 1e-7);
  const bool tall = x.size(0) > x.size(1);
  if (tall) x = x.t().contiguous();
  for (int i = 0; i < 5; ++i) {
    const at::Tensor gram = at::mm(x, x.t().contiguous());
    x = x * a + at::mm(gram * b + at::mm(gram, gram) * c, x);
  }
  return tall ? x.t().contiguous() : x;
}

at::Tensor muon(const Rates& r, const at::Tensor& parameter, const at::Tensor& g, Named& state) {
  at::Tensor& m = state[0].second;
  const at::Tensor p = parameter * (1 - r.lr * r.decay);
  m = m * r.o.momentum + g;
  const double shape = std::sqrt(std::max(1.0, static_cast<double>(p.size(0)) / static_cast<double>(p.size(1))));
  return p - orthogonalized(g + m * r.o.momentum) * (r.lr * shape);
}

}  // namespace

OptimizerState::OptimizerState(Optimizer optimizer, const Named& parameters) : optimizer_(std::move(optimizer)) {
  require_valid(optimizer_);
  for (const auto& [name, value] : parameters) {
    Held held{.name = name, .by_muon = optimizer_.kind == Kind::muon && value.dim() == 2 && value.numel() > 0, .state = {}};
    for (const Optimizer::Group& group : optimizer_.groups)
      if (name.find(group.pattern) != std::string::npos) {
        held.lr_factor = group.lr_factor;
        held.decay_factor = group.decay_factor;
        break;
      }
    for (const std::string& slot : slots(optimizer_, held.by_muon)) held.state.emplace_back(slot, at::zeros_like(value));
    held_.push_back(std::move(held));
  }
}

Named OptimizerState::update(const Named& parameters, const Named& gradients, double lr_factor) {
  Named updated;
  size_t next = 0;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& [name, p] = parameters[i];
    const bool frozen = next == gradients.size() || gradients[next].first != name;
    updated.emplace_back(name, frozen ? p : update(held_[i], p, gradients[next].second, lr_factor));
    next += !frozen;
  }
  return updated;
}

at::Tensor OptimizerState::update(Held& held, const at::Tensor& p, const at::Tensor& g, double lr_factor) const {
  ++held.updates;
  const Rates rates{optimizer_, optimizer_.lr * (lr_factor * held.lr_factor), optimizer_.weight_decay * held.decay_factor,
                    static_cast<double>(held.updates)};
  if (held.by_muon) return muon(rates, p, g, held.state);
  switch (optimizer_.kind) {
    case Kind::sgd: return sgd(rates, p, g, held.state);
    case Kind::adam: return adam(rates, p, g, held.state, /*decoupled=*/false);
    case Kind::lion: return lion(rates, p, g, held.state);
    default: return adam(rates, p, g, held.state, /*decoupled=*/true);
  }
}

std::vector<std::pair<std::string, Named>> OptimizerState::tensors() const {
  std::vector<std::pair<std::string, Named>> result;
  for (const char* slot : {"momentum_buffer", "exp_avg", "exp_avg_sq"}) {
    Named named;
    for (const Held& held : held_)
      for (const auto& [name, value] : held.state)
        if (name == slot) named.emplace_back(held.name, value);
    if (!named.empty()) result.emplace_back(slot, std::move(named));
  }
  return result;
}

}  // namespace golden
