// The C++ reference against its contract, bit for bit, by loops over single numbers.
#include "golden/models.h"
#include "golden/train.h"
#include "properties/kit/golden_runs.h"

namespace {

using namespace golden_runs;
using Floats = std::vector<float>;

golden::Model random_model() {
  return pick({true, false}) ? random_mlp() : random_gpt();
}

Floats floats(const at::Tensor& t) {
  const at::Tensor flat = t.contiguous();
  return Floats(flat.const_data_ptr<float>(), flat.const_data_ptr<float>() + flat.numel());
}

using golden_runs::same_bits;
bool same_bits(const at::Tensor& a, const Floats& b) {
  return static_cast<size_t>(a.numel()) == b.size() && golden_runs::same_bits(a.flatten(), at::tensor(b));
}

bool same_bits(const golden::StepTrace& a, const golden::StepTrace& b) {
  bool same = a.losses == b.losses && a.gradient_norm == b.gradient_norm && a.state.size() == b.state.size() &&
              same_bits(a.gradients, b.gradients) && same_bits(a.parameters, b.parameters);
  for (size_t i = 0; same && i < a.state.size(); ++i) same = same_bits(a.state[i].second, b.state[i].second);
  return same;
}

bool same_bits(const golden::Trace& a, const golden::Trace& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) { return same_bits(x, y); });
}

// The run with one step of the one microbatch, nothing divided and nothing clipped.
golden::StepTrace alone(const golden::Run& run, const golden::Microbatch& microbatch) {
  golden::Run single = run;
  single.order = {};
  single.steps = {{.microbatches = {{microbatch}}}};
  return golden::train(single).front();
}

Floats plus(Floats a, const Floats& b) {
  for (size_t i = 0; i < a.size(); ++i) a[i] += b[i];
  return a;
}

// Sum over [k][i] of parameter p's gradients; both orders written out.
Floats expected_sum(const std::vector<std::vector<golden::StepTrace>>& parts, size_t p, bool reduces_each_round) {
  const auto part = [&](size_t k, size_t i) { return floats(parts[k][i].gradients[p].second); };
  const size_t rounds = parts.size(), ranks = parts.front().size();
  Floats sum;
  if (!reduces_each_round) {
    for (size_t i = 0; i < ranks; ++i) {
      Floats rank = part(0, i);
      for (size_t k = 1; k < rounds; ++k) rank = plus(rank, part(k, i));
      sum = i == 0 ? rank : plus(sum, rank);
    }
  } else {
    for (size_t k = 0; k < rounds; ++k) {
      Floats round = part(k, 0);
      for (size_t i = 1; i < ranks; ++i) round = plus(round, part(k, i));
      sum = k == 0 ? round : plus(sum, round);
    }
  }
  return sum;
}

RC_GTEST_PROP(Golden, gradients_are_summed_in_the_order_named_then_divided_then_clipped, ()) {
  golden::Run run = random_run(random_model());
  run.steps.resize(1);
  const golden::Step& step = run.steps.front();
  const golden::StepTrace trace = golden::train(run).front();

  std::vector<std::vector<golden::StepTrace>> parts;
  for (size_t k = 0; k < step.microbatches.size(); ++k) {
    parts.emplace_back();
    for (size_t i = 0; i < step.microbatches[k].size(); ++i) {
      parts.back().push_back(alone(run, step.microbatches[k][i]));
      RC_ASSERT(trace.losses[k][i] == parts[k][i].losses[0][0]);
    }
  }
  const double factor = step.clip_norm / (trace.gradient_norm + 1e-6);
  long double squares = 0;
  for (size_t p = 0; p < run.parameters.size(); ++p) {
    Floats expected = expected_sum(parts, p, !step.reduce_after.empty());
    for (float& g : expected) {
      g = g / static_cast<float>(step.divide);
      squares += static_cast<long double>(g) * g;
      if (step.clip_norm != 0 && factor < 1) g = g * static_cast<float>(factor);
    }
    RC_ASSERT(same_bits(trace.gradients[p].second, expected));
  }
  RC_ASSERT(std::abs(trace.gradient_norm - std::sqrt(static_cast<double>(squares))) <= 2e-16 * trace.gradient_norm);
}

RC_GTEST_PROP(Golden, with_one_round_or_one_rank_both_orders_are_one, ()) {
  golden::Run run = random_run(random_model());
  const bool one_round = pick({true, false});
  for (golden::Step& step : run.steps) {
    if (one_round) step.microbatches.resize(1);
    if (!one_round)
      for (auto& round : step.microbatches) round.resize(1);
  }
  if (!one_round) run.order.shards = 1;
  reduce(run, When::last_round);
  const golden::Trace a = golden::train(run);
  reduce(run, When::each_round);
  RC_ASSERT(same_bits(a, golden::train(run)));
}

TEST(Golden, with_three_rounds_of_three_ranks_the_orders_differ) {
  Tensors tensors(3);
  golden::Run run = mlp_run({7, 5, 3}, 3, 3, tensors);
  run.order.shards = 3;
  const golden::Trace a = golden::train(run);
  reduce(run, When::each_round);
  EXPECT_FALSE(same_bits(a, golden::train(run)));
}

// One element's state and the formulas of golden.h, one float operation a line.
struct Element {
  float p, m = 0, v = 0;

  void sgd(const golden::Optimizer& o, float g) {
    if (o.weight_decay != 0) {
      const float decay = static_cast<float>(o.weight_decay) * p;
      g = g + decay;
    }
    if (o.momentum != 0) {
      const float kept = static_cast<float>(o.momentum) * m;
      g = m = kept + g;
    }
    const float change = static_cast<float>(o.lr) * g;
    p = p - change;
  }

  void adamw(const golden::Optimizer& o, int64_t t, float g) {
    p = p * static_cast<float>(1 - o.lr * o.weight_decay);
    const float kept_m = static_cast<float>(o.beta1) * m, new_m = static_cast<float>(1 - o.beta1) * g;
    m = kept_m + new_m;
    const float kept_v = static_cast<float>(o.beta2) * v, square = g * g, new_v = static_cast<float>(1 - o.beta2) * square;
    v = kept_v + new_v;
    const float root = std::sqrt(v);
    const float corrected = root / static_cast<float>(std::sqrt(1 - std::pow(o.beta2, static_cast<double>(t))));
    const float below = corrected + static_cast<float>(o.eps);
    const float ratio = m / below;
    const float change = static_cast<float>(o.lr / (1 - std::pow(o.beta1, static_cast<double>(t)))) * ratio;
    p = p - change;
  }
};

const golden::Named* state_of(const golden::StepTrace& step, const std::string& name) {
  for (const auto& [key, tensors] : step.state)
    if (key == name) return &tensors;
  return nullptr;
}

RC_GTEST_PROP(Golden, the_update_is_the_formula_of_the_header_one_operation_at_a_time, ()) {
  const golden::Run run = random_run(random_model());
  const bool adamw = run.optimizer.kind == golden::Optimizer::Kind::adamw;
  const golden::Trace trace = golden::train(run);
  for (size_t p = 0; p < run.parameters.size(); ++p) {
    std::vector<Element> elements;
    for (const float value : floats(run.parameters[p].second)) elements.push_back({.p = value});
    for (size_t s = 0; s < trace.size(); ++s) {
      const Floats g = floats(trace[s].gradients[p].second);
      Floats parameters, m, v;
      for (size_t e = 0; e < elements.size(); ++e) {
        adamw ? elements[e].adamw(run.optimizer, static_cast<int64_t>(s) + 1, g[e]) : elements[e].sgd(run.optimizer, g[e]);
        parameters.push_back(elements[e].p), m.push_back(elements[e].m), v.push_back(elements[e].v);
      }
      RC_ASSERT(same_bits(trace[s].parameters[p].second, parameters));
      const golden::Named* first = state_of(trace[s], adamw ? "exp_avg" : "momentum_buffer");
      const golden::Named* second = state_of(trace[s], "exp_avg_sq");
      RC_ASSERT((first != nullptr) == (adamw || run.optimizer.momentum != 0));
      RC_ASSERT((second != nullptr) == adamw);
      if (first != nullptr) RC_ASSERT(same_bits((*first)[p].second, m));
      if (second != nullptr) RC_ASSERT(same_bits((*second)[p].second, v));
    }
  }
}

RC_GTEST_PROP(Golden, a_trainer_step_by_step_is_the_run_and_touches_nothing_given_to_it, ()) {
  const golden::Run run = random_run(random_model());
  golden::Named given;
  for (const auto& [name, value] : run.parameters) given.emplace_back(name, value.clone());
  const golden::Trace trace = golden::train(run);
  golden::Trainer trainer(run.model, run.optimizer, run.parameters, run.order);
  golden::Trace stepped;
  for (const golden::Step& step : run.steps) stepped.push_back(trainer.step(step));
  RC_ASSERT(same_bits(trace, stepped));  // also: a later step left the traces of earlier ones alone
  RC_ASSERT(same_bits(given, run.parameters));
  RC_ASSERT(same_bits(trainer.parameters(), trace.back().parameters));
}

// A product that underflows from below is -0.0 where the kernel keeps it, and 0.0 + -0.0 is 0.0: a sum that
// starts from zeros would lose the sign.
TEST(Golden, a_negative_zero_gradient_stays_negative) {
  int64_t negative_zeros = 0;
  for (const int64_t in : {1, 2, 3})
    for (const int64_t out : {1, 2, 3}) {
      golden::Run run;
      run.model.mlp = {.widths = {in, out}, .bias = false};
      run.parameters = {{"layers.0.weight", at::zeros({out, in})}};
      const golden::Microbatch tiny{at::full({1, in}, 1e-25), at::full({1, out}, 1e-25), 1};
      const at::Tensor single = alone(run, tiny).gradients[0].second;
      ASSERT_TRUE(at::all(single == 0).item<bool>());
      negative_zeros += at::signbit(single).sum().item<int64_t>();
      run.steps = {{.microbatches = {{tiny, tiny}, {tiny, tiny}}}};
      run.order.shards = 2;
      for (const auto when : {When::last_round, When::each_round}) {
        reduce(run, when);
        EXPECT_TRUE(same_bits(golden::train(run)[0].gradients[0].second, single));
      }
    }
  ASSERT_GT(negative_zeros, 0) << "no kernel here gives a negative zero; find other data for this test";
}

TEST(Golden, tied_weights_are_one_parameter_with_the_gradient_of_both_uses) {
  Tensors tensors(9);
  golden::Run tied;
  tied.model.kind = golden::Model::Kind::gpt;
  tied.model.gpt = {.layers = 1, .hidden = 6, .heads = 2, .vocab = 7, .positions = 4, .tied = true};
  tied.parameters = random_parameters(tied.model, tensors);
  tied.steps = {{.microbatches = {{{tensors.tokens({2, 4}, 7), tensors.tokens({2, 4}, 7), 1}}}}};
  golden::Run untied = tied;
  untied.model.gpt.tied = false;
  untied.parameters.emplace_back("lm_head.weight", tied.parameters[0].second);

  const golden::Named both = golden::train(tied)[0].gradients, apart = golden::train(untied)[0].gradients;
  ASSERT_EQ(both.size() + 1, apart.size());
  const Floats expected = plus(floats(apart.front().second), floats(apart.back().second));
  EXPECT_TRUE(same_bits(both.front().second, expected));
  for (size_t i = 1; i < both.size(); ++i) EXPECT_TRUE(same_bits(both[i].second, apart[i].second));
}

// Logits of zero parameters are zero, so every token costs log(vocab).
TEST(Golden, one_token_through_no_layers_costs_log_vocab_times_weight) {
  golden::Run run;
  run.model.kind = golden::Model::Kind::gpt;
  run.model.gpt = {.layers = 0, .hidden = 1, .heads = 1, .vocab = 5, .positions = 1};
  for (const auto& [name, shape] : golden::parameter_shapes(run.model)) run.parameters.emplace_back(name, at::zeros(shape));
  run.steps = {{.microbatches = {{{at::zeros({1, 1}, at::kLong), at::zeros({1, 1}, at::kLong), 0.5}}}}};
  EXPECT_NEAR(golden::train(run)[0].losses[0][0], std::log(5.0) / 2, 1e-7);
}

TEST(Golden, not_a_number_is_carried_on) {
  golden::Run run;
  run.model.mlp.widths = {2, 1};
  run.parameters = {{"layers.0.weight", at::ones({1, 2})}, {"layers.0.bias", at::zeros({1})}};
  run.steps = {{.microbatches = {{{at::full({1, 2}, NAN), at::zeros({1, 1}), 1}}}, .clip_norm = 1}};
  const golden::StepTrace step = golden::train(run).front();
  EXPECT_TRUE(std::isnan(step.losses[0][0]));
  EXPECT_TRUE(std::isnan(step.gradient_norm));
  EXPECT_TRUE(at::isnan(step.parameters[0].second).all().item<bool>());
}

// The caller's tensors may lie anywhere and have any strides.
RC_GTEST_PROP(Golden, where_the_data_lies_does_not_matter, ()) {
  golden::Run run = random_run(random_model());
  const golden::Trace trace = golden::train(run);
  const auto elsewhere = [](const at::Tensor& t) {
    at::Tensor larger = at::empty({t.numel() + 3}, t.options());
    return larger.narrow(0, draw(1, 3), t.numel()).view(t.sizes()).copy_(t);
  };
  const auto strided = [](const at::Tensor& t) { return t.transpose(0, -1).contiguous().transpose(0, -1); };
  for (auto& [name, value] : run.parameters) value = pick({true, false}) ? elsewhere(value) : strided(value);
  for (golden::Step& step : run.steps)
    for (auto& round : step.microbatches)
      for (golden::Microbatch& m : round) m = {elsewhere(m.input), strided(m.target), m.weight, m.branch};
  RC_ASSERT(same_bits(trace, golden::train(run)));
}

// What bit equality of sharded runs rests on: kernels may depend on addresses modulo 64 bytes, and on nothing
// more of them.
RC_GTEST_PROP(Golden, kernels_give_the_same_bits_at_any_address_that_is_64_byte_aligned, ()) {
  const golden::Run run = random_run(random_model());
  const golden::Microbatch& m = run.steps[0].microbatches[0][0];
  const auto gradients_at = [&](bool moved) {
    golden::Parameters leaves;
    std::vector<at::Tensor> inputs;
    for (const auto& [name, value] : run.parameters) {
      const int64_t shift = moved ? 16 * draw(0, 70) : 0;
      at::Tensor home = at::empty({shift + value.numel()});
      inputs.push_back(home.narrow(0, shift, value.numel()).view(value.sizes()).copy_(value).detach());
      leaves.emplace(name, inputs.back().set_requires_grad(true));
    }
    const at::Tensor loss = golden::loss(run.model, leaves, m);
    loss.backward();
    std::vector<at::Tensor> results = {loss.detach()};
    for (const at::Tensor& leaf : inputs) results.push_back(leaf.grad());
    return results;
  };
  const auto here = gradients_at(false), there = gradients_at(true);
  for (size_t i = 0; i < here.size(); ++i) RC_ASSERT(same_bits(here[i], there[i]));
}

golden::Run gpt_run() {
  golden::Run run;
  Tensors tensors(1);
  run.model.kind = golden::Model::Kind::gpt;
  run.parameters = random_parameters(run.model, tensors);
  run.steps = {{.microbatches = {{{tensors.tokens({2, 3}, 16), tensors.tokens({2, 3}, 16), 1}}}}};
  return run;
}

TEST(GoldenRefusals, a_model_that_cannot_be_built) {
  golden::Run run = gpt_run();
  run.model.gpt.heads = 3;
  expect_refused(run, "hidden 8 is not divisible by heads 3");
  run.model.gpt.heads = 0;
  expect_refused(run, "heads=0");
  run.model = {};
  expect_refused(run, "at least two");
  run.model.mlp.widths = {3, 0, 2};
  expect_refused(run, "[3, 0, 2]");
}

TEST(GoldenRefusals, parameters_of_another_model) {
  golden::Run run = gpt_run();
  run.parameters[3].second = at::zeros({9});
  expect_refused(run, "parameter 3: expected h.0.ln_1.bias Float [8], got h.0.ln_1.bias Float [9]");
  run = gpt_run();
  std::swap(run.parameters[2], run.parameters[3]);
  expect_refused(run, "expected h.0.ln_1.weight");
  run = gpt_run();
  run.parameters.pop_back();
  expect_refused(run, "expected 17 parameters, got 16");
  run = gpt_run();
  run.parameters[0].second = run.parameters[0].second.to(at::kDouble);
  expect_refused(run, "got wte.weight Double");
}

TEST(GoldenRefusals, data_that_does_not_fit) {
  golden::Run run = gpt_run();
  golden::Microbatch& m = run.steps[0].microbatches[0][0];
  m.input[1][2] = 16;
  expect_refused(run, "input token 5 is 16, expected 0 to vocab - 1 = 15");
  m.input = at::zeros({2, 9}, at::kLong);
  expect_refused(run, "got Long [2, 9]");
  m.target = at::zeros({2, 9}, at::kLong);
  expect_refused(run, "positions = 8");
  m.input = m.target = at::zeros({0, 4}, at::kLong);
  expect_refused(run, "B >= 1");
  m.input = at::zeros({2, 3});
  expect_refused(run, "got Float [2, 3]");
  m.input = at::Tensor();
  expect_refused(run, "got nothing");
}

TEST(GoldenRefusals, steps_and_optimizers_that_make_no_sense) {
  golden::Run run = gpt_run();
  run.steps[0].divide = 0;
  expect_refused(run, "divide");
  run = gpt_run();
  run.steps[0].clip_norm = -1;
  expect_refused(run, "clip_norm");
  run = gpt_run();
  run.steps[0].microbatches.push_back({});
  expect_refused(run, "round 1 has 0 ranks");
  run.steps[0].microbatches.clear();
  expect_refused(run, "at least one round");
  run = gpt_run();
  run.optimizer.lr = -0.1;
  expect_refused(run, "lr");
  run.optimizer = {.kind = golden::Optimizer::Kind::adamw, .beta2 = 1};
  expect_refused(run, "beta2");
}

TEST(GoldenRefusals, more_threads_than_one) {
  at::set_num_threads(2);
  expect_refused(gpt_run(), "at::set_num_threads(1)");
  at::set_num_threads(1);
}

}  // namespace
