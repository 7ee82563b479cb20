#include "golden/train.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "golden/canonical_models.h"
#include "golden/jitter.h"
#include "golden/norm.h"
#include "golden/validate.h"

namespace golden {
namespace {

// Kernels may take another path for data at another address modulo 64, so every operand starts where the
// allocator puts it; a caller's view into something larger is copied.
at::Tensor aligned(const at::Tensor& tensor) {
  const at::Tensor t = tensor.contiguous();
  return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 64 == 0 ? t : t.clone();
}

Microbatch prepared(const Microbatch& microbatch, at::ScalarType compute, at::ScalarType main, c10::Device device) {
  const auto convert = [&](const at::Tensor& t, at::ScalarType dtype) {
    return aligned(t.is_floating_point() ? t.to(dtype) : t).to(device);
  };
  return {convert(microbatch.input, compute), convert(microbatch.target, main), microbatch.weight, microbatch.branch,
          microbatch.dropout_seed};
}

Named checked_copy(const Model& model, const Named& parameters, at::ScalarType dtype) {
  require_valid(model, parameters);
  Named copies;
  for (const auto& [name, value] : parameters)
    copies.emplace_back(name, value.detach().to(dtype, /*non_blocking=*/false, /*copy=*/true, at::MemoryFormat::Contiguous));
  return copies;
}

void require_one_thread() {
  if (at::get_num_threads() != 1)
    refuse(
        fmt::format("bits depend on the number of threads and at::get_num_threads() is {}; call "
                    "at::set_num_threads(1) when the process starts",
                    at::get_num_threads()));
}

bool all_finite(const Tensors& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [](const at::Tensor& t) { return at::isfinite(t).all().item<bool>(); });
}

bool is_frozen(const Step& step, const std::string& name) {
  return std::find(step.frozen.begin(), step.frozen.end(), name) != step.frozen.end();
}

// In the order of the model's own.
Named checked_buffers(const Model& model, const Named& given, at::ScalarType dtype) {
  Named copies;
  for (const auto& [name, own] : initial_buffers(model, dtype)) {
    const auto it = std::find_if(given.begin(), given.end(), [&name = name](const auto& item) { return item.first == name; });
    if (it == given.end() || it->second.sizes() != own.sizes())
      refuse(fmt::format("buffer {}: expected [{}], got {}", name, fmt::join(own.sizes(), ", "),
                         it == given.end() ? "none" : fmt::format("[{}]", fmt::join(it->second.sizes(), ", "))));
    copies.emplace_back(name, it->second.detach().to(dtype, /*non_blocking=*/false, /*copy=*/true));
  }
  if (copies.size() != given.size())
    refuse(fmt::format("{} buffers are given, and the model has {}", given.size(), copies.size()));
  return copies;
}

// Those that have optimizer state: of a model with adapters theirs alone.
Named with_state(const Model& model, const Named& parameters) {
  if (model.adapters.layers.empty()) return parameters;
  Named adapters;
  for (const auto& item : parameters)
    if (item.first.find(".lora_") != std::string::npos) adapters.push_back(item);
  return adapters;
}

// The truth is not rounded to anything.
Precision in_dtype(const Precision& precision, at::ScalarType dtype) {
  if (dtype == at::kFloat) return precision;
  return {.compute = dtype, .gradient = dtype, .reduce = dtype, .float32_sums = false};
}

}  // namespace

struct Trainer::Collected {
  const Step& step;
  std::vector<std::vector<double>>& losses;
  double loss_scale;
  const Counts* of_step = nullptr;  // of a balance over the step, once they are known
  Counts counts = {};
};

Trainer::Trainer(Model model, Optimizer optimizer, const Named& parameters, SumOrder order, Precision precision,
                 LossScaling scaling, at::ScalarType dtype, uint64_t jitter, c10::Device device, double ema,
                 const Named& buffers)
    : model_(std::move(model)),
      order_(order),
      precision_(in_dtype(precision, dtype)),
      scaling_(scaling),
      jitter_(jitter),
      device_(device),
      main_(dtype),
      parameters_(checked_copy(model_, parameters, dtype)),
      optimizer_(std::move(optimizer), with_state(model_, parameters_)),
      loss_scale_(scaling.initial),
      ema_(ema),
      averages_(ema != 0 ? parameters_ : Named{}) {
  if (dtype != at::kFloat && dtype != at::kDouble)
    refuse(fmt::format("dtype: expected Float or Double, got {}", c10::toString(dtype)));
  require_valid(order);
  require_valid(precision);
  require_valid(scaling);
  if (!(ema >= 0 && ema < 1)) refuse(fmt::format("ema: expected a number in [0, 1), got {}", ema));
  if (!buffers.empty()) buffers_ = {checked_buffers(model_, buffers, dtype)};
}

Tensors Trainer::gradients(Collected& collected, size_t round, size_t rank) const {
  if (model_.canonical) {
    const CanonicalPass pass = canonical_pass(model_, with_buffers(parameters_, rank), collected.step.microbatches[round][rank],
                                              /*training=*/true, &collected.counts, collected.of_step);
    collected.losses[round][rank] = pass.loss;
    Tensors gradients;
    for (const auto& [name, value] : parameters_)
      if (!is_frozen(collected.step, name)) gradients.push_back(pass.gradients.at(name));
    return gradients;
  }
  at::AutoGradMode with_graph(true);
  const Parameters leaves = to_compute(parameters_, rank);
  Tensors trained;
  for (const auto& [name, value] : parameters_)
    if (!is_frozen(collected.step, name)) trained.push_back(leaves.at(name).set_requires_grad(true));
  const Microbatch microbatch = prepared(collected.step.microbatches[round][rank], precision_.compute, main_, device_);
  at::Tensor output = golden::loss(model_, leaves, microbatch, /*training=*/true, &collected.counts, collected.of_step);
  collected.losses[round][rank] = output.item<double>();
  if (collected.loss_scale != 0) output = output * collected.loss_scale;

  Tensors gradients(trained.size());
  if (output.requires_grad())
    gradients = torch::autograd::grad({output}, trained, {}, /*retain_graph=*/false, /*create_graph=*/false,
                                      /*allow_unused=*/true);
  for (size_t i = 0; i < gradients.size(); ++i)
    gradients[i] = gradients[i].defined() ? gradients[i].to(at::kCPU) : at::zeros(trained[i].sizes(), trained[i].scalar_type());
  return gradients;
}

Parameters Trainer::with_buffers(const Named& values, size_t rank) const {
  Parameters all(values.begin(), values.end());
  if (!buffers_.empty()) all.insert(buffers_[rank].begin(), buffers_[rank].end());
  return all;
}

Parameters Trainer::to_compute(const Named& values, size_t rank) const {
  Parameters leaves;
  for (const auto& [name, value] : values) {
    at::Tensor leaf = value.detach().to(precision_.compute);
    if (jitter_ != 0) leaf = jittered(leaf, jitter_ + leaves.size());
    leaves.emplace(name, leaf.to(device_));
  }
  if (!buffers_.empty())
    for (const auto& [name, buffer] : buffers_[rank]) leaves.emplace(name, buffer);
  return leaves;
}

double Trainer::evaluated(const Named& values, const Microbatch& microbatch, size_t rank) const {
  require_one_thread();
  const at::NoGradGuard no_graph;
  Model model = model_;
  model.gpt.dropout = model.llama.dropout = model.adapters.dropout = 0;
  if (model.canonical) return canonical_pass(model, with_buffers(values, rank), microbatch, /*training=*/false).loss;
  const Microbatch data = prepared(microbatch, precision_.compute, main_, device_);
  return golden::loss(model, to_compute(values, rank), data, /*training=*/false).item<double>();
}

void Trainer::begin_buffers(const Step& step) {
  const Named begin = buffers_.empty() ? initial_buffers(model_, main_) : buffers_[0];
  if (begin.empty()) return;
  const size_t ranks = step.microbatches.front().size();
  if (step.after || buffers_.size() != ranks) buffers_.assign(ranks, begin);
  for (Named& own : buffers_)
    for (auto& [name, buffer] : own) buffer = buffer.to(device_, /*non_blocking=*/false, /*copy=*/true);
}

Tensors Trainer::local_sum(Collected& collected, size_t begin, size_t end, size_t rank) const {
  Tensors sum;
  for (size_t round = begin; round < end; ++round) accumulate(sum, gradients(collected, round, rank), precision_.gradient);
  const double divide = collected.step.divide_before;
  if (divide != 1)
    for (at::Tensor& t : sum) t = t / at::scalar_tensor(divide, at::kDouble).to(t.scalar_type());
  return sum;
}

Tensors Trainer::summed_gradients(Collected& collected) const {
  const Step& step = collected.step;
  const SumOrder& order = order_of(step);
  const size_t rounds = step.microbatches.size(), ranks = step.microbatches.front().size();
  const size_t shards = order.canonical ? ranks : static_cast<size_t>(order.shards), replicas = ranks / shards;
  std::vector<Tensors> by_replica(replicas);
  Tensors total;
  for (size_t begin = 0, end = 0; end < rounds; begin = end) {
    do ++end;
    while (end < rounds && (step.reduce_after.empty() || !step.reduce_after[end - 1]));
    Reduction over_replicas(static_cast<int64_t>(replicas), precision_);
    for (size_t replica = 0; replica < replicas; ++replica) {
      Reduction over_shards(static_cast<int64_t>(shards), precision_);
      for (size_t shard = 0; shard < shards; ++shard)
        over_shards.add(local_sum(collected, begin, end, replica * shards + shard));
      if (order.replicas_last)
        accumulate(by_replica[replica], over_shards.result(), precision_.gradient);
      else
        over_replicas.add(over_shards.result());
    }
    if (!order.replicas_last) accumulate(total, over_replicas.result(), precision_.gradient);
  }
  if (!order.replicas_last) return total;
  Reduction over_replicas(static_cast<int64_t>(replicas), precision_);
  for (const Tensors& sum : by_replica) over_replicas.add(sum);
  return over_replicas.result();
}

Tensors Trainer::canonical_gradients(Collected& collected) const {
  CanonicalSum sum;
  for (size_t round = 0; round < collected.step.microbatches.size(); ++round)
    for (size_t rank = 0; rank < collected.step.microbatches[round].size(); ++rank) sum.add(gradients(collected, round, rank));
  return sum.result();
}

void Trainer::adapt_scale(bool finite) {
  if (!finite) {
    loss_scale_ = std::max(loss_scale_ / 2, scaling_.minimum);
    good_steps_ = 0;
  } else if (++good_steps_ == scaling_.growth_interval) {
    loss_scale_ *= 2;
    good_steps_ = 0;
  }
}

void Trainer::move_biases(const Counts& counts) {
  if (model_.llama.expert_bias == 0) return;
  for (Named& own : buffers_)
    for (auto& [name, buffer] : own)
      if (const auto it = counts.find(name); it != counts.end()) {
        const at::Tensor missing = at::sign(it->second.sum() - it->second * static_cast<double>(it->second.numel()));
        buffer = buffer + missing.to(buffer.options()) * model_.llama.expert_bias;
      }
}

void Trainer::average(const Step& step) {
  for (size_t i = 0; i < averages_.size(); ++i) {
    auto& [name, value] = averages_[i];
    if (!is_frozen(step, name)) value = value * ema_ + parameters_[i].second * (1 - ema_);
  }
}

StepTrace Trainer::step(const Step& step) {
  require_one_thread();
  require_valid(model_, step);
  require_valid(order_of(step), step);
  if (model_.canonical && (!order_of(step).canonical || loss_scale_ != 0))
    refuse("a model with canonical arithmetic needs canonical sums, and no loss scaling");
  at::NoGradGuard no_graph;
  StepTrace trace;
  trace.loss_scale = loss_scale_;
  const std::vector<Microbatch>& first = step.microbatches.front();
  trace.losses.assign(step.microbatches.size(), std::vector<double>(first.size()));
  Collected collected{step, trace.losses, loss_scale_};
  begin_buffers(step);
  for (size_t rank = 0; step.evaluate && rank < first.size(); ++rank)
    trace.evaluated.push_back(evaluated(averages_.empty() ? parameters_ : averages_, first[rank], rank));
  for (size_t rank = 0; step.discard && rank < buffers_.size(); ++rank) gradients(collected, 0, rank);
  collected.counts.clear();
  Counts of_step;
  if (model_.kind == Model::Kind::llama && model_.llama.balance_over == Llama::BalanceOver::step) {
    for (size_t rank = 0; rank < first.size(); ++rank) gradients(collected, 0, rank);
    of_step = std::exchange(collected.counts, {});
    collected.of_step = &of_step;
  }
  const bool integers = order_of(step).canonical && main_ == at::kFloat;
  Tensors gradients = integers ? canonical_gradients(collected) : summed_gradients(collected);
  for (at::Tensor& g : gradients) g = g.to(main_);
  if (scaling_.initial != 0) {
    const bool finite = all_finite(gradients);
    adapt_scale(finite);
    trace.skipped = !finite;
  }
  if (!trace.skipped) {
    if (step.divide != 1)
      for (at::Tensor& g : gradients) g = g / step.divide;
    if (scaling_.initial != 0)
      for (at::Tensor& g : gradients) g = g / trace.loss_scale;

    trace.gradient_norm = norm(gradients, step.norm_order);
    const double factor = step.clip_norm / (trace.gradient_norm + 1e-6);
    if (step.clip_norm != 0 && factor < 1)
      for (at::Tensor& g : gradients) g = g * factor;

    size_t next = 0;
    for (const auto& [name, value] : parameters_)
      if (!is_frozen(step, name)) trace.gradients.emplace_back(name, gradients[next++]);
    parameters_ = optimizer_.update(parameters_, trace.gradients, step.lr_factor);
    average(step);
    move_biases(collected.counts);
  }
  trace.parameters = parameters_;
  trace.buffers = buffers_;
  for (Named& own : trace.buffers)
    for (auto& [name, buffer] : own) buffer = buffer.to(at::kCPU);
  trace.state = optimizer_.tensors();
  if (!averages_.empty()) trace.state.emplace_back("ema", averages_);
  return trace;
}

Trace train(const Run& run, at::ScalarType dtype) {
  Trainer trainer(run.model, run.optimizer, run.parameters, run.order, run.precision, run.scaling, dtype, run.jitter,
                  run.device, run.ema);
  Trace trace;
  std::vector<Trainer> ends{trainer};  // before the first step, and after each
  for (const Step& step : run.steps) {
    if (step.after) trainer = ends[static_cast<size_t>(*step.after + 1)];
    trace.push_back(trainer.step(step));
    ends.push_back(trainer);
  }
  return trace;
}

}  // namespace golden
