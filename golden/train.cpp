#include "golden/train.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <set>
#include <stdexcept>

#include "golden/models.h"
#include "golden/norm.h"
#include "golden/sums.h"
#include "golden/validate.h"

namespace golden {
namespace {

[[noreturn]] void refuse(const std::string& what) {
  throw std::invalid_argument("golden: " + what);
}

// Kernels may take another path for data at another address modulo 64, so every operand starts where the
// allocator puts it; a caller's view into something larger is copied.
at::Tensor aligned(const at::Tensor& tensor) {
  const at::Tensor t = tensor.contiguous();
  return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 64 == 0 ? t : t.clone();
}

Named checked_copy(const Model& model, const Named& parameters, at::ScalarType dtype) {
  require_valid(model, parameters);
  Named copies;
  for (const auto& [name, value] : parameters)
    copies.emplace_back(
        name, value.detach().to(dtype, /*non_blocking=*/false, /*copy=*/true, at::MemoryFormat::Contiguous));
  return copies;
}

void require_one_thread() {
  if (at::get_num_threads() != 1)
    refuse(
        fmt::format("bits depend on the number of threads and at::get_num_threads() is {}; call "
                    "at::set_num_threads(1) when the process starts",
                    at::get_num_threads()));
}

// One forward and backward. `leaves` are the parameters as the model computes with them; the ones without a gradient are frozen.
Tensors backward(const Model& model, const Named& parameters, const std::set<std::string>& frozen, at::ScalarType compute,
                 const Microbatch& microbatch, double scale, double* loss) {
  at::AutoGradMode with_graph(true);
  Parameters leaves;
  Tensors inputs;
  std::vector<size_t> trained;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& [name, value] = parameters[i];
    const at::Tensor leaf = aligned(value.detach().to(compute)).set_requires_grad(!frozen.contains(name));
    leaves.emplace(name, leaf);
    if (!leaf.requires_grad()) continue;
    inputs.push_back(leaf);
    trained.push_back(i);
  }
  Microbatch data = microbatch;
  data.input = aligned(microbatch.input.is_floating_point() ? microbatch.input.to(compute) : microbatch.input);
  data.target = aligned(microbatch.target.is_floating_point() && compute == at::kDouble ? microbatch.target.to(compute)
                                                                                        : microbatch.target);
  at::Tensor output = golden::loss(model, leaves, data);
  *loss = output.item<double>();
  if (scale != 0) output = output * scale;
  Tensors gradients = torch::autograd::grad({output}, inputs, {}, /*retain_graph=*/false, /*create_graph=*/false,
                                            /*allow_unused=*/true);
  for (size_t i = 0; i < gradients.size(); ++i)
    if (!gradients[i].defined()) gradients[i] = at::zeros_like(inputs[i]);
  return gradients;
}

bool all_finite(const Tensors& tensors) {
  for (const at::Tensor& t : tensors)
    if (!at::isfinite(t).all().item<bool>()) return false;
  return true;
}

}  // namespace

Trainer::Trainer(const Run& run, at::ScalarType dtype)
    : model_(run.model),
      order_(run.order),
      precision_(run.precision),
      dtype_(dtype),
      parameters_(checked_copy(model_, run.parameters, dtype)),
      optimizer_(run.optimizer, parameters_),
      scaling_(run.scaling),
      loss_scale_(run.scaling.initial) {
  if (dtype != at::kFloat && dtype != at::kDouble)
    refuse(fmt::format("dtype: expected Float or Double, got {}", c10::toString(dtype)));
}

StepTrace Trainer::step(const Step& step) {
  require_one_thread();
  require_valid(model_, step);
  if (order_.shards * order_.replicas != static_cast<int64_t>(step.microbatches.front().size()))
    refuse(fmt::format("a round has {} ranks, the order of sums {} x {}", step.microbatches.front().size(), order_.replicas,
                       order_.shards));
  at::NoGradGuard no_graph;
  StepTrace trace;
  trace.loss_scale = loss_scale_;
  trace.losses.assign(step.microbatches.size(), std::vector<double>(step.microbatches.front().size()));
  const std::set<std::string> frozen(step.frozen.begin(), step.frozen.end());
  const at::ScalarType compute = dtype_ == at::kFloat ? precision_.compute : dtype_;
  Tensors gradients = summed_gradients(step, order_, precision_, dtype_, [&](size_t round, size_t rank) {
    return backward(model_, parameters_, frozen, compute, step.microbatches[round][rank], loss_scale_, &trace.losses[round][rank]);
  });
  if (step.divide != 1)
    for (at::Tensor& g : gradients) g = g / step.divide;
  if (loss_scale_ != 0) {
    trace.skipped = !all_finite(gradients);
    good_steps_ = trace.skipped ? 0 : good_steps_ + 1;
    if (!trace.skipped)
      for (at::Tensor& g : gradients) g = g / loss_scale_;
    if (trace.skipped) loss_scale_ /= 2;
    else if (good_steps_ == scaling_.growth_interval) loss_scale_ *= 2, good_steps_ = 0;
  }
  if (!trace.skipped) update(step, frozen, gradients, trace);
  trace.parameters = parameters_;
  trace.state = optimizer_.tensors();
  return trace;
}

void Trainer::update(const Step& step, const std::set<std::string>& frozen, Tensors gradients, StepTrace& trace) {
  trace.gradient_norm = norm(gradients, step.norm_order);
  const double factor = step.clip_norm / (trace.gradient_norm + 1e-6);
  if (step.clip_norm != 0 && factor < 1)
    for (at::Tensor& g : gradients) g = g * factor;
  size_t next = 0;
  for (const auto& [name, value] : parameters_)
    if (!frozen.contains(name)) trace.gradients.emplace_back(name, gradients[next++]);
  parameters_ = optimizer_.update(parameters_, trace.gradients, step.lr_factor);
}

Trace train(const Run& run, at::ScalarType dtype) {
  Trainer trainer(run, dtype);
  Trace trace;
  for (const Step& step : run.steps) trace.push_back(trainer.step(step));
  return trace;
}

}  // namespace golden
