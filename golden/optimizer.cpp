#include "golden/optimizer.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "golden/norm.h"
#include "golden/validate.h"

namespace golden {

namespace {

// at::sqrt of floats is a vector library's, one ulp off in a fifth of all values. The double root of a float is so close to
// exact that rounding it to float gives the correctly rounded root.
at::Tensor rounded_sqrt(const at::Tensor& values) {
  if (values.scalar_type() != at::kFloat) return values.sqrt();
  return values.to(at::kDouble).sqrt().to(at::kFloat);
}

bool is_matrix(const at::Tensor& parameter) {
  return parameter.dim() == 2 && parameter.numel() > 0;
}

// 1, -1, or the value itself, which is a zero or NaN.
at::Tensor sign_of(const at::Tensor& values) {
  return at::where(values > 0, at::ones_like(values), at::where(values < 0, -at::ones_like(values), values));
}

}  // namespace

at::Tensor orthogonalized(const at::Tensor& matrix) {
  constexpr double a = 3.4445, b = -4.7750, c = 2.0315;
  const at::Tensor length = at::scalar_tensor(norm({matrix.to(at::kCPU)}), at::kDouble).to(matrix.scalar_type());
  at::Tensor x = matrix / length.clamp_min(1e-7);
  const bool tall = x.size(0) > x.size(1);
  if (tall) x = x.t().contiguous();
  for (int i = 0; i < 5; ++i) {
    const at::Tensor gram = at::mm(x, x.t().contiguous());
    const at::Tensor correction = gram * b + at::mm(gram, gram) * c;
    x = x * a + at::mm(correction, x);
  }
  return tall ? x.t().contiguous() : x;
}

OptimizerState::OptimizerState(Optimizer optimizer, const Named& parameters) : optimizer_(std::move(optimizer)) {
  require_valid(optimizer_);
  for (const char* slot : {"momentum_buffer", "exp_avg", "exp_avg_sq"}) {
    Named state;
    for (const auto& [name, value] : parameters) {
      const std::vector<std::string> slots = slots_of(value);
      if (std::find(slots.begin(), slots.end(), slot) != slots.end()) state.emplace_back(name, at::zeros_like(value));
    }
    if (!state.empty()) tensors_.emplace_back(slot, std::move(state));
  }
}

std::vector<std::string> OptimizerState::slots_of(const at::Tensor& parameter) const {
  switch (optimizer_.kind) {
    case Optimizer::Kind::sgd:
      return optimizer_.momentum != 0 ? std::vector<std::string>{"momentum_buffer"} : std::vector<std::string>{};
    case Optimizer::Kind::lion:
      return {"exp_avg"};
    case Optimizer::Kind::muon:
      if (is_matrix(parameter)) return {"momentum_buffer"};
      return {"exp_avg", "exp_avg_sq"};
    case Optimizer::Kind::adam:
    case Optimizer::Kind::adamw:
      return {"exp_avg", "exp_avg_sq"};
  }
  throw std::logic_error("golden: unknown optimizer");
}

at::Tensor& OptimizerState::state(const char* slot, const std::string& parameter) {
  for (auto& [key, tensors] : tensors_)
    if (key == slot)
      for (auto& [name, value] : tensors)
        if (name == parameter) return value;
  throw std::logic_error("golden: no state " + std::string(slot) + " of " + parameter);
}

Named OptimizerState::update(const Named& parameters, const Named& gradients, double lr_factor) {
  Named result;
  size_t next = 0;
  for (const auto& [name, p] : parameters) {
    if (next == gradients.size() || gradients[next].first != name) {
      result.emplace_back(name, p);
      continue;
    }
    Optimizer::Group group;
    for (const Optimizer::Group& candidate : optimizer_.groups)
      if (name.find(candidate.pattern) != std::string::npos) {
        group = candidate;
        break;
      }
    result.emplace_back(name, updated({.name = name,
                                       .parameter = p,
                                       .gradient = gradients[next++].second,
                                       .lr = optimizer_.lr * lr_factor * group.lr_factor,
                                       .weight_decay = optimizer_.weight_decay * group.decay_factor}));
  }
  return result;
}

at::Tensor OptimizerState::updated(const Update& u) {
  ++updates_[u.name];
  switch (optimizer_.kind) {
    case Optimizer::Kind::sgd:
      return sgd(u);
    case Optimizer::Kind::adam:
      return adam(u, /*decoupled=*/false);
    case Optimizer::Kind::adamw:
      return adam(u, /*decoupled=*/true);
    case Optimizer::Kind::lion:
      return lion(u);
    case Optimizer::Kind::muon:
      return is_matrix(u.parameter) ? muon(u) : adam(u, /*decoupled=*/true);
  }
  throw std::logic_error("golden: unknown optimizer");
}

at::Tensor OptimizerState::sgd(const Update& u) {
  at::Tensor g = u.gradient;
  if (u.weight_decay != 0) g = g + u.parameter * u.weight_decay;
  if (optimizer_.momentum != 0) {
    at::Tensor& m = state("momentum_buffer", u.name);
    m = m * optimizer_.momentum + g;
    g = optimizer_.nesterov ? g + m * optimizer_.momentum : m;
  }
  return u.parameter - g * u.lr;
}

at::Tensor OptimizerState::adam(const Update& u, bool decoupled) {
  const double beta1 = optimizer_.beta1, beta2 = optimizer_.beta2, t = static_cast<double>(updates_[u.name]);
  const double step_size = u.lr / (1 - std::pow(beta1, t));
  const double root_correction = std::sqrt(1 - std::pow(beta2, t));

  at::Tensor p = u.parameter, g = u.gradient;
  if (decoupled) p = p * (1 - u.lr * u.weight_decay);
  if (!decoupled && u.weight_decay != 0) g = g + p * u.weight_decay;
  at::Tensor& m = state("exp_avg", u.name);
  at::Tensor& v = state("exp_avg_sq", u.name);
  m = m * beta1 + g * (1 - beta1);
  v = v * beta2 + (g * g) * (1 - beta2);
  return p - (m / (rounded_sqrt(v) / root_correction + optimizer_.eps)) * step_size;
}

at::Tensor OptimizerState::lion(const Update& u) {
  const double beta1 = optimizer_.beta1, beta2 = optimizer_.beta2;
  at::Tensor& m = state("exp_avg", u.name);
  const at::Tensor direction = sign_of(m * beta1 + u.gradient * (1 - beta1));
  m = m * beta2 + u.gradient * (1 - beta2);
  return u.parameter * (1 - u.lr * u.weight_decay) - direction * u.lr;
}

at::Tensor OptimizerState::muon(const Update& u) {
  at::Tensor& m = state("momentum_buffer", u.name);
  const at::Tensor share = u.gradient * (1 - optimizer_.momentum);
  m = m * optimizer_.momentum + share;
  const at::Tensor x = orthogonalized((share + m * optimizer_.momentum).to(optimizer_.device)).to(at::kCPU);
  const double rows = static_cast<double>(x.size(0)), columns = static_cast<double>(x.size(1));
  return u.parameter * (1 - u.lr * u.weight_decay) - x * (u.lr * std::sqrt(std::max(1.0, rows / columns)));
}

}  // namespace golden
