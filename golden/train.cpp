#include "golden/train.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/autograd.h>

#include <cmath>
#include <stdexcept>

#include "golden/models.h"
#include "golden/norm.h"
#include "golden/validate.h"

namespace golden {
namespace {

using Tensors = std::vector<at::Tensor>;

[[noreturn]] void refuse(const std::string& what) {
  throw std::invalid_argument("golden: " + what);
}

// Kernels may take another path for data at another address modulo 64, so every operand starts where the
// allocator puts it; a caller's view into something larger is copied.
at::Tensor aligned(const at::Tensor& tensor) {
  const at::Tensor t = tensor.contiguous();
  return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 64 == 0 ? t : t.clone();
}

Microbatch prepared(const Microbatch& microbatch, at::ScalarType dtype) {
  const auto convert = [&](const at::Tensor& t) { return aligned(t.is_floating_point() ? t.to(dtype) : t); };
  return {convert(microbatch.input), convert(microbatch.target), microbatch.weight};
}

// The first term is copied, the rest are added: zeros keep their sign.
void add(Tensors& sum, const Tensors& terms) {
  if (sum.empty()) {
    for (const at::Tensor& term : terms) sum.push_back(term.clone(at::MemoryFormat::Contiguous));
    return;
  }
  for (size_t i = 0; i < terms.size(); ++i) sum[i].add_(terms[i]);
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

}  // namespace

Trainer::Trainer(Model model, Optimizer optimizer, const Named& parameters, SumOrder order,
                 at::ScalarType dtype)
    : model_(std::move(model)),
      order_(order),
      dtype_(dtype),
      parameters_(checked_copy(model_, parameters, dtype)),
      optimizer_(optimizer, parameters_) {
  if (dtype != at::kFloat && dtype != at::kDouble)
    refuse(fmt::format("dtype: expected Float or Double, got {}", c10::toString(dtype)));
}

Tensors Trainer::gradients(const Microbatch& microbatch, double* loss) const {
  at::AutoGradMode with_graph(true);
  Parameters leaves;
  Tensors inputs;
  for (const auto& [name, value] : parameters_) {
    inputs.push_back(value.detach().set_requires_grad(true));
    leaves.emplace(name, inputs.back());
  }
  const at::Tensor output = golden::loss(model_, leaves, prepared(microbatch, dtype_));
  *loss = output.item<double>();
  Tensors gradients =
      torch::autograd::grad({output}, inputs, {}, /*retain_graph=*/false, /*create_graph=*/false,
                            /*allow_unused=*/true);
  for (size_t i = 0; i < gradients.size(); ++i)
    if (!gradients[i].defined()) gradients[i] = at::zeros_like(parameters_[i].second);
  return gradients;
}

Tensors Trainer::summed_gradients(const Step& step, std::vector<std::vector<double>>* losses) const {
  const size_t rounds = step.microbatches.size(), ranks = step.microbatches.front().size();
  losses->assign(rounds, std::vector<double>(ranks));
  const bool ranks_outside = order_ == SumOrder::rounds_then_ranks;
  Tensors sum;
  for (size_t outer = 0; outer < (ranks_outside ? ranks : rounds); ++outer) {
    Tensors partial;
    for (size_t inner = 0; inner < (ranks_outside ? rounds : ranks); ++inner) {
      const size_t round = ranks_outside ? inner : outer, rank = ranks_outside ? outer : inner;
      add(partial, gradients(step.microbatches[round][rank], &(*losses)[round][rank]));
    }
    add(sum, partial);
  }
  return sum;
}

StepTrace Trainer::step(const Step& step) {
  require_one_thread();
  require_valid(model_, step);
  at::NoGradGuard no_graph;
  StepTrace trace;
  Tensors gradients = summed_gradients(step, &trace.losses);
  if (step.divide != 1)
    for (at::Tensor& g : gradients) g = g / step.divide;

  trace.gradient_norm = std::sqrt(sum_of_squares(gradients));
  const double factor = step.clip_norm / (trace.gradient_norm + 1e-6);
  if (step.clip_norm != 0 && factor < 1)
    for (at::Tensor& g : gradients) g = g * factor;

  for (size_t i = 0; i < gradients.size(); ++i)
    trace.gradients.emplace_back(parameters_[i].first, gradients[i]);
  parameters_ = optimizer_.update(parameters_, trace.gradients);
  trace.parameters = parameters_;
  trace.state = optimizer_.tensors();
  return trace;
}

Trace train(const Run& run, at::ScalarType dtype) {
  Trainer trainer(run.model, run.optimizer, run.parameters, run.order, dtype);
  Trace trace;
  for (const Step& step : run.steps) trace.push_back(trainer.step(step));
  return trace;
}

}  // namespace golden
