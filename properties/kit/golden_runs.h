// Random golden runs, and how far two traces are apart.
#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "golden/golden.h"
#include "golden/train.h"
#include "properties/kit/bits.h"

namespace golden_runs {

// Bits depend on the number of threads; golden::train insists on one.
class OneThread : public testing::Environment {
 public:
  void SetUp() override { at::set_num_threads(1); }
};
inline testing::Environment* const one_thread = testing::AddGlobalTestEnvironment(new OneThread);

// One random stream of tensors; rapidcheck draws its seed.
class Tensors {
 public:
  explicit Tensors(uint64_t seed) : generator_(at::make_generator<at::CPUGeneratorImpl>(seed)) {}
  at::Tensor normal(at::IntArrayRef shape, double scale = 1) {
    return at::randn(shape, generator_, at::TensorOptions(at::kFloat)) * scale;
  }
  at::Tensor tokens(at::IntArrayRef shape, int64_t vocab) {
    return at::randint(0, vocab, shape, generator_, at::TensorOptions(at::kLong));
  }

 private:
  at::Generator generator_;
};

inline int64_t draw(int64_t low, int64_t high) {
  return *rc::gen::inRange<int64_t>(low, high + 1);
}
template <typename T>
T pick(std::initializer_list<T> values) {
  return *rc::gen::elementOf(std::vector<T>(values));
}

inline golden::Model random_mlp() {
  golden::Model model;
  model.kind = golden::Model::Kind::mlp;
  model.mlp.widths.clear();
  for (int64_t i = 0, layers = draw(1, 4); i <= layers; ++i) model.mlp.widths.push_back(draw(1, 9));
  using A = golden::Activation;
  model.mlp.activation = pick({A::identity, A::relu, A::tanh, A::gelu});
  model.mlp.bias = pick({true, false});
  return model;
}

// Hidden sizes from 3: layer norm of one or two features is constant but for eps, so that its gradient is
// little but rounding noise.
inline golden::Model random_gpt() {
  golden::Model model;
  model.kind = golden::Model::Kind::gpt;
  golden::Gpt& gpt = model.gpt;
  gpt.layers = draw(0, 3);
  gpt.heads = draw(1, 3);
  gpt.hidden = gpt.heads * draw(gpt.heads == 1 ? 3 : 2, 5);
  gpt.vocab = draw(2, 13);
  gpt.positions = draw(1, 7);
  gpt.tied = pick({true, false});
  return model;
}

inline golden::Model random_llama() {
  golden::Model model;
  model.kind = golden::Model::Kind::llama;
  golden::Llama& llama = model.llama;
  llama.layers = draw(0, 3);
  llama.kv_heads = draw(1, 2);
  llama.heads = llama.kv_heads * draw(1, 3);
  llama.hidden = llama.heads * 2 * draw(llama.heads == 1 ? 2 : 1, 3);
  llama.intermediate = draw(1, 9);
  llama.vocab = draw(2, 13);
  llama.positions = draw(1, 7);
  llama.tied = pick({true, false});
  llama.qk_norm = llama.hidden / llama.heads >= 4 && pick({true, false});
  llama.qkv_bias = pick({true, false});
  llama.head_size = 2 * draw(0, 3);
  llama.qk_norm &= llama.head() >= 4;
  return model;
}

// Features of at least four numbers under a group norm, for the same reason.
inline golden::Model random_conv() {
  golden::Model model;
  model.kind = golden::Model::Kind::conv;
  golden::Conv& conv = model.conv;
  conv.channels.clear();
  for (int64_t i = 0, layers = draw(1, 3); i <= layers; ++i) conv.channels.push_back(draw(1, 4));
  conv.kernel = pick<int64_t>({1, 3, 5});
  conv.size = draw(2, 5);
  conv.classes = draw(1, 4);
  conv.norm = pick({true, false});
  return model;
}

inline golden::Model random_odd() {
  golden::Model model;
  model.kind = golden::Model::Kind::odd;
  golden::Odd& odd = model.odd;
  odd.width = draw(1, 6);
  odd.calls = draw(1, 3);
  for (bool* part : {&odd.gain, &odd.cube, &odd.empty, &odd.side, &odd.never, &odd.tied}) *part = draw(0, 3) > 0;
  return model;
}

inline golden::Model any_model() {
  switch (draw(0, 4)) {
    case 0:
      return random_mlp();
    case 4:
      return random_llama();
    case 1:
      return random_gpt();
    case 2:
      return random_conv();
    default:
      return random_odd();
  }
}

inline golden::Optimizer random_optimizer() {
  golden::Optimizer o;
  o.kind = pick({golden::Optimizer::Kind::sgd, golden::Optimizer::Kind::adamw});
  o.lr = pick({0.1, 0.01, 0.003});
  o.momentum = pick({0.0, 0.5, 0.9});
  o.weight_decay = pick({0.0, 0.01, 0.3});
  o.beta1 = pick({0.9, 0.5, 0.0});
  o.beta2 = pick({0.999, 0.9});
  o.eps = pick({1e-2, 1e-3});
  return o;
}

inline golden::Named random_parameters(const golden::Model& model, Tensors& tensors) {
  golden::Named parameters;
  for (const auto& [name, shape] : golden::parameter_shapes(model)) {
    at::Tensor value = tensors.normal(shape, 0.4);
    const bool norm = name.find("ln_") != std::string::npos || name.find("norm.") != std::string::npos;
    if (norm && name.ends_with("weight")) value += 1;
    parameters.emplace_back(name, value);
  }
  return parameters;
}

inline golden::Microbatch random_microbatch(const golden::Model& model, Tensors& tensors, double weight) {
  const int64_t batch = draw(1, 4);
  const auto floats = [&](std::vector<int64_t> in, int64_t out) -> golden::Microbatch {
    in.insert(in.begin(), batch);
    return {tensors.normal(in), tensors.normal({batch, out}), weight, pick({true, false})};
  };
  const golden::Conv& conv = model.conv;
  switch (model.kind) {
    case golden::Model::Kind::mlp:
      return floats({model.mlp.widths.front()}, model.mlp.widths.back());
    case golden::Model::Kind::conv:
      return floats({conv.channels.front(), conv.size, conv.size}, conv.classes);
    case golden::Model::Kind::odd:
      return floats({model.odd.width}, model.odd.width);
    case golden::Model::Kind::gpt:
    case golden::Model::Kind::llama:
      break;
  }
  const int64_t length = draw(1, model.positions());
  return {tensors.tokens({batch, length}, model.vocab()), tensors.tokens({batch, length}, model.vocab()), weight};
}

inline golden::Run one_microbatch_run(uint64_t seed = 0) {
  Tensors tensors(seed);
  golden::Run run;
  run.model.mlp.widths = {3, 5, 2};
  run.parameters = random_parameters(run.model, tensors);
  run.steps.push_back({.microbatches = {{{tensors.normal({4, 3}), tensors.normal({4, 2}), 1}}}});
  return run;
}

enum class When { last_round, each_round };
inline void reduce(golden::Run& run, When when) {
  for (golden::Step& step : run.steps) step.reduce_after.assign(when == When::each_round ? step.microbatches.size() : 0, true);
}

inline golden::Run random_run(const golden::Model& model) {
  Tensors tensors(*rc::gen::arbitrary<uint64_t>());
  golden::Run run;
  run.model = model;
  run.optimizer = random_optimizer();
  run.parameters = random_parameters(model, tensors);
  const int64_t rounds = draw(1, 3), ranks = draw(1, 4);
  run.order.shards = ranks;
  for (int64_t s = 0, steps = draw(1, 3); s < steps; ++s) {
    golden::Step step;
    step.divide = pick({1.0, 3.0, 8.0});
    step.clip_norm = pick({0.0, 0.05, 1.0, 1e4});
    for (int64_t k = 0; k < rounds; ++k) {
      step.microbatches.emplace_back();
      for (int64_t i = 0; i < ranks; ++i)
        step.microbatches.back().push_back(random_microbatch(model, tensors, pick({1.0, 0.25, 1.0 / 7})));
    }
    run.steps.push_back(std::move(step));
  }
  reduce(run, pick({When::last_round, When::each_round}));
  return run;
}

// The same with what the whole family adds: other optimizers, groups, rates, replicas, norms, and parameters that are frozen
// now and then.
inline golden::Run random_family_run(const golden::Model& model, golden::Optimizer::Kind kind) {
  golden::Run run = random_run(model);
  run.optimizer.kind = kind;
  run.optimizer.nesterov = kind == golden::Optimizer::Kind::sgd && run.optimizer.momentum != 0 && pick({true, false});
  run.optimizer.groups.clear();
  for (const char* pattern : {"weight", "bias", "0", "sha"})
    if (pick({true, false})) run.optimizer.groups.push_back({pattern, pick({0.0, 0.5, 1.0, 1.3}), pick({0.0, 1.0, 0.3})});
  const int64_t ranks = run.order.shards;
  while (ranks % (run.order.replicas = draw(1, ranks)) != 0) continue;
  run.order.shards = ranks / run.order.replicas;
  run.order.replicas_last = pick({true, false});
  for (golden::Step& step : run.steps) {
    for (size_t k = 0; k < step.reduce_after.size(); ++k) step.reduce_after[k] = pick({true, false});
    step.divide_before = pick({1.0, 2.0, 3.0});
    step.norm_order = pick({1.0, 2.0, double{INFINITY}});
    step.lr_factor = pick({1.0, 0.25, 0.7});
    for (const auto& [name, value] : run.parameters)
      if (draw(0, 5) == 0) step.frozen.push_back(name);
  }
  return run;
}

// One step of an MLP with these widths: `rounds` rounds of `ranks` microbatches of four samples.
inline golden::Run mlp_run(std::vector<int64_t> widths, int64_t rounds, int64_t ranks, Tensors& tensors) {
  golden::Run run;
  run.model.mlp.widths = widths;
  run.parameters = random_parameters(run.model, tensors);
  run.steps.emplace_back();
  for (int64_t k = 0; k < rounds; ++k) {
    run.steps[0].microbatches.emplace_back();
    for (int64_t i = 0; i < ranks; ++i)
      run.steps[0].microbatches.back().push_back({tensors.normal({4, widths.front()}), tensors.normal({4, widths.back()}), 1});
  }
  return run;
}

using kit::same_bits;
inline bool same_bits(const golden::Named& a, const golden::Named& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const auto& x, const auto& y) { return x.first == y.first && same_bits(x.second, y.second); });
}

// Expects golden::train to refuse the run, in these words among others.
inline void expect_refused(const golden::Run& run, const std::string& words) {
  try {
    golden::train(run);
    ADD_FAILURE() << "expected a refusal that says: " << words;
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find(words), std::string::npos) << error.what();
  }
}

// |a - b| / max(|a|, |b|) in the Frobenius norm; 0 when both are zero, infinite when shapes differ or one is
// not finite.
inline double distance(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes()) return INFINITY;
  const at::Tensor x = a.to(at::kDouble), y = b.to(at::kDouble);
  const double scale = std::max(x.norm().item<double>(), y.norm().item<double>());
  const double apart = (x - y).norm().item<double>();
  if (!std::isfinite(scale) || !std::isfinite(apart)) return INFINITY;
  return scale == 0 ? 0 : apart / scale;
}
inline double distance(double a, double b) {
  return distance(at::scalar_tensor(a, at::kDouble), at::scalar_tensor(b, at::kDouble));
}

// The largest distance between two traces of the same run and where it is.
class Widest {
 public:
  double apart = 0;
  std::string where = "nowhere";

  Widest(const golden::Trace& a, const golden::Trace& b) {
    if (a.size() != b.size()) note(INFINITY, "number of steps");
    for (size_t s = 0; s < std::min(a.size(), b.size()); ++s) steps(a[s], b[s], "step " + std::to_string(s) + " ");
  }

 private:
  void note(double distance, const std::string& here) {
    if (distance > apart) apart = distance, where = here;
  }
  void named(const golden::Named& a, const golden::Named& b, const std::string& here) {
    if (a.size() != b.size()) note(INFINITY, here + "number of tensors");
    for (size_t i = 0; i < std::min(a.size(), b.size()); ++i)
      note(a[i].first == b[i].first ? distance(a[i].second, b[i].second) : INFINITY, here + a[i].first);
  }
  void steps(const golden::StepTrace& a, const golden::StepTrace& b, const std::string& here) {
    if (a.losses.size() != b.losses.size()) note(INFINITY, here + "rounds");
    for (size_t k = 0; k < std::min(a.losses.size(), b.losses.size()); ++k)
      note(distance(at::tensor(a.losses[k], at::kDouble), at::tensor(b.losses[k], at::kDouble)), here + "losses");
    note(distance(a.gradient_norm, b.gradient_norm), here + "norm");
    named(a.gradients, b.gradients, here + "gradient ");
    named(a.parameters, b.parameters, here + "parameter ");
    if (a.state.size() != b.state.size()) note(INFINITY, here + "kinds of state");
    for (size_t i = 0; i < std::min(a.state.size(), b.state.size()); ++i) {
      if (a.state[i].first != b.state[i].first) note(INFINITY, here + "names of state");
      named(a.state[i].second, b.state[i].second, here + a.state[i].first + " ");
    }
  }
};

}  // namespace golden_runs
