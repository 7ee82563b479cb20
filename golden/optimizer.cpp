#include "golden/optimizer.h"

#include <ATen/ATen.h>

#include <cmath>

#include "golden/validate.h"

namespace golden {

namespace {

// at::sqrt of floats is a vector library's, one ulp off in a fifth of all values. The double root of a float is so close to
// exact that rounding it to float gives the correctly rounded root.
at::Tensor rounded_sqrt(const at::Tensor& values) {
  if (values.scalar_type() != at::kFloat) return values.sqrt();
  return values.to(at::kDouble).sqrt().to(at::kFloat);
}

}  // namespace

OptimizerState::OptimizerState(Optimizer optimizer, const Named& parameters) : optimizer_(optimizer) {
  require_valid(optimizer_);
  const auto zeros = [&](const char* name) {
    Named state;
    for (const auto& [parameter, value] : parameters) state.emplace_back(parameter, at::zeros_like(value));
    tensors_.emplace_back(name, std::move(state));
  };
  if (optimizer_.kind == Optimizer::Kind::adamw) {
    zeros("exp_avg");
    zeros("exp_avg_sq");
  } else if (optimizer_.momentum != 0) {
    zeros("momentum_buffer");
  }
}

Named OptimizerState::update(const Named& parameters, const Named& gradients) {
  ++steps_;
  Named updated;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& [name, p] = parameters[i];
    const at::Tensor& g = gradients[i].second;
    updated.emplace_back(name, optimizer_.kind == Optimizer::Kind::adamw ? adamw(i, p, g) : sgd(i, p, g));
  }
  return updated;
}

at::Tensor OptimizerState::sgd(size_t index, const at::Tensor& parameter, const at::Tensor& gradient) {
  at::Tensor g = gradient;
  if (optimizer_.weight_decay != 0) g = g + parameter * optimizer_.weight_decay;
  if (optimizer_.momentum != 0) {
    at::Tensor& m = state(0, index);
    m = m * optimizer_.momentum + g;
    g = m;
  }
  return parameter - g * optimizer_.lr;
}

at::Tensor OptimizerState::adamw(size_t index, const at::Tensor& parameter, const at::Tensor& g) {
  const auto [kind, lr, momentum, weight_decay, beta1, beta2, eps] = optimizer_;
  const double t = static_cast<double>(steps_);
  const double step_size = lr / (1 - std::pow(beta1, t));
  const double root_correction = std::sqrt(1 - std::pow(beta2, t));

  const at::Tensor p = parameter * (1 - lr * weight_decay);
  at::Tensor& m = state(0, index);
  at::Tensor& v = state(1, index);
  m = m * beta1 + g * (1 - beta1);
  v = v * beta2 + (g * g) * (1 - beta2);
  return p - (m / (rounded_sqrt(v) / root_correction + eps)) * step_size;
}

}  // namespace golden
