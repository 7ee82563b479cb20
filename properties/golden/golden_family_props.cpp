// Models and optimizers of the data-parallel family: what each of them promises.
#include "golden/models.h"
#include "golden/optimizer.h"
#include "properties/kit/golden_runs.h"

namespace {

using namespace golden_runs;
using Kind = golden::Optimizer::Kind;

Kind any_kind() {
  return pick({Kind::sgd, Kind::adam, Kind::adamw, Kind::lion, Kind::muon});
}

const at::Tensor* find(const golden::Named& tensors, const std::string& name) {
  for (const auto& [key, value] : tensors)
    if (key == name) return &value;
  return nullptr;
}

// One float operation a line.
struct Element {
  float p, m = 0, v = 0;
  int64_t t = 0;

  void update(const golden::Optimizer& o, float g, double lr, double decay) {
    ++t;
    const bool coupled = o.kind == Kind::sgd || o.kind == Kind::adam;
    if (coupled && decay != 0) g = g + static_cast<float>(decay) * p;
    if (!coupled) p = p * static_cast<float>(1 - lr * decay);
    if (o.kind == Kind::sgd) sgd(o, g, lr);
    if (o.kind == Kind::adam || o.kind == Kind::adamw) adam(o, g, lr);
    if (o.kind == Kind::lion) lion(o, g, lr);
  }

 private:
  void sgd(const golden::Optimizer& o, float g, double lr) {
    const auto momentum = static_cast<float>(o.momentum);
    if (o.momentum != 0) {
      const float kept = momentum * m;
      m = kept + g;
      const float ahead = momentum * m;
      g = o.nesterov ? g + ahead : m;
    }
    const float change = static_cast<float>(lr) * g;
    p = p - change;
  }
  void adam(const golden::Optimizer& o, float g, double lr) {
    const double n = static_cast<double>(t);
    const float kept_m = static_cast<float>(o.beta1) * m, new_m = static_cast<float>(1 - o.beta1) * g;
    m = kept_m + new_m;
    const float square = g * g, kept_v = static_cast<float>(o.beta2) * v, new_v = static_cast<float>(1 - o.beta2) * square;
    v = kept_v + new_v;
    const float corrected = std::sqrt(v) / static_cast<float>(std::sqrt(1 - std::pow(o.beta2, n)));
    const float ratio = m / (corrected + static_cast<float>(o.eps));
    const float change = static_cast<float>(lr / (1 - std::pow(o.beta1, n))) * ratio;
    p = p - change;
  }
  void lion(const golden::Optimizer& o, float g, double lr) {
    const float kept = static_cast<float>(o.beta1) * m, fresh = static_cast<float>(1 - o.beta1) * g, blend = kept + fresh;
    const float kept_m = static_cast<float>(o.beta2) * m, new_m = static_cast<float>(1 - o.beta2) * g;
    m = kept_m + new_m;
    if (blend > 0) p = p - static_cast<float>(lr);
    if (blend < 0) p = p + static_cast<float>(lr);
  }
};

golden::Optimizer::Group first_match(const golden::Optimizer& o, const std::string& name) {
  for (const auto& group : o.groups)
    if (name.find(group.pattern) != std::string::npos) return group;
  return {};
}

RC_GTEST_PROP(GoldenOptimizers, every_elementwise_update_is_the_formula_with_the_rates_of_step_and_first_group, ()) {
  const golden::Run run = random_family_run(any_model(), pick({Kind::sgd, Kind::adam, Kind::adamw, Kind::lion}));
  const golden::Optimizer& o = run.optimizer;
  const golden::Trace trace = golden::train(run);
  for (const auto& [name, initial] : run.parameters) {
    const auto group = first_match(o, name);
    const at::Tensor flat = initial.flatten();
    std::vector<Element> elements;
    for (int64_t e = 0; e < flat.numel(); ++e) elements.push_back({.p = flat[e].item<float>()});
    for (size_t s = 0; s < trace.size(); ++s) {
      const at::Tensor* gradient = find(trace[s].gradients, name);
      const double lr = o.lr * run.steps[s].lr_factor * group.lr_factor;
      const at::Tensor expected = at::empty_like(flat);
      for (int64_t e = 0; e < flat.numel(); ++e) {
        Element& element = elements[static_cast<size_t>(e)];
        if (gradient) element.update(o, gradient->flatten()[e].item<float>(), lr, o.weight_decay * group.decay_factor);
        expected.mutable_data_ptr<float>()[e] = element.p;
      }
      RC_ASSERT(same_bits(find(trace[s].parameters, name)->flatten(), expected));
    }
  }
}

RC_GTEST_PROP(GoldenOptimizers, frozen_parameters_have_no_gradient_and_do_not_move, ()) {
  const golden::Run run = random_family_run(any_model(), any_kind());
  const golden::Trace trace = golden::train(run);
  for (size_t s = 0; s < trace.size(); ++s) {
    const golden::StepTrace* before = s > 0 ? &trace[s - 1] : nullptr;
    RC_ASSERT(trace[s].gradients.size() + run.steps[s].frozen.size() == run.parameters.size());
    for (const std::string& name : run.steps[s].frozen) {
      RC_ASSERT(find(trace[s].gradients, name) == nullptr);
      RC_ASSERT(same_bits(*find(trace[s].parameters, name), *find(before ? before->parameters : run.parameters, name)));
      for (size_t slot = 0; slot < trace[s].state.size(); ++slot)
        if (const at::Tensor* state = find(trace[s].state[slot].second, name))
          RC_ASSERT((before ? same_bits(*state, *find(before->state[slot].second, name)) : at::all(*state == 0).item<bool>()));
    }
  }
}

// Freezing changes what is reported of a parameter, not the numbers of the others, as long as nothing was updated.
RC_GTEST_PROP(GoldenOptimizers, freezing_one_parameter_changes_no_bit_of_anothers_gradient, ()) {
  golden::Run run = random_run(any_model());
  run.steps.resize(1);
  run.steps[0].clip_norm = 0;
  const golden::Named all = golden::train(run)[0].gradients;
  for (const auto& [name, value] : run.parameters)
    if (pick({true, false})) run.steps[0].frozen.push_back(name);
  const golden::Named some = golden::train(run)[0].gradients;
  for (const auto& [name, gradient] : some) RC_ASSERT(same_bits(gradient, *find(all, name)));
}

RC_GTEST_PROP(GoldenOptimizers, steps_frozen_do_not_count_as_updates, ()) {
  golden::Run run = random_run(random_mlp());
  run.optimizer.kind = pick({Kind::adam, Kind::adamw, Kind::muon});
  run.steps.resize(1);
  golden::Run late = run;
  late.steps.insert(late.steps.begin(), run.steps[0]);
  for (const auto& [name, value] : run.parameters) late.steps[0].frozen.push_back(name);
  RC_ASSERT(same_bits(golden::train(run)[0].parameters, golden::train(late)[1].parameters));
}

RC_GTEST_PROP(GoldenOptimizers, lion_moves_every_element_by_the_rate_or_not_at_all, ()) {
  golden::Run run = random_run(any_model());
  run.optimizer = {.kind = Kind::lion, .lr = 0x1p-6, .beta1 = 0.9, .beta2 = 0.99};
  for (auto& [name, value] : run.parameters) value = (value * 1024).round() / 1024;  // so that moves are exact
  const golden::Trace trace = golden::train(run);
  golden::Named before = run.parameters;
  for (const golden::StepTrace& step : trace) {
    for (size_t i = 0; i < before.size(); ++i) {
      const at::Tensor moved = (step.parameters[i].second - before[i].second).abs();
      RC_ASSERT(at::all((moved == 0x1p-6) + (moved == 0)).item<bool>());
      if (&step == &trace.front()) RC_ASSERT(at::equal(moved == 0, step.gradients[i].second == 0));
    }
    before = step.parameters;
  }
}

RC_GTEST_PROP(GoldenOptimizers, nesterov_looks_one_momentum_further_than_plain, ()) {
  golden::Run run = random_run(random_mlp());
  run.optimizer = {.kind = Kind::sgd, .lr = 0.5, .momentum = 0.5};
  run.steps.resize(1);
  const golden::StepTrace plain = golden::train(run)[0];
  run.optimizer.nesterov = true;
  const golden::StepTrace nesterov = golden::train(run)[0];
  RC_ASSERT(same_bits(plain.state[0].second, nesterov.state[0].second));
  for (size_t i = 0; i < run.parameters.size(); ++i) {
    const at::Tensor& p = run.parameters[i].second;
    RC_ASSERT(same_bits(plain.parameters[i].second, p - plain.gradients[i].second * 0.5));
    RC_ASSERT(same_bits(nesterov.parameters[i].second, p - (plain.gradients[i].second * 1.5) * 0.5));
  }
}

// Five steps bring singular values between 0.01 and 1 of the normalised matrix near 1.
RC_GTEST_PROP(GoldenOptimizers, muons_direction_of_a_whole_matrix_is_nearly_orthogonal, ()) {
  Tensors tensors(*rc::gen::arbitrary<uint64_t>());
  const int64_t rows = draw(1, 24), columns = draw(1, 24);
  const at::Tensor matrix = tensors.normal({rows, columns}, pick({1e-3, 1.0, 1e4})), x = golden::orthogonalized(matrix);
  const auto [u, s, v] = at::linalg_svd(matrix.to(at::kDouble), /*full_matrices=*/false);
  const at::Tensor seen = at::diagonal(u.t().mm(x.to(at::kDouble)).mm(v.t()));
  const at::Tensor large = s / s.norm() > 0.01;  // the others are still on their way
  RC_ASSERT(at::all(at::logical_not(large) + ((seen > 0.6) * (seen < 1.3))).item<bool>());
  // Nothing but the singular values changes.
  RC_ASSERT((x.to(at::kDouble) - u.mm(at::diag(seen)).mm(v)).norm().item<double>() < 1e-3);
}

RC_GTEST_PROP(GoldenOptimizers, muon_updates_matrices_by_their_orthogonal_direction_and_the_rest_as_adamw, ()) {
  golden::Run run = random_family_run(any_model(), Kind::muon);
  run.optimizer.groups.clear();
  run.steps.resize(1);
  run.steps[0].lr_factor = 1;
  const golden::StepTrace muon = golden::train(run)[0];
  golden::Run other = run;
  other.optimizer.kind = Kind::adamw;
  const golden::StepTrace adamw = golden::train(other)[0];
  const golden::Optimizer& o = run.optimizer;
  for (size_t i = 0; i < run.parameters.size(); ++i) {
    const auto& [name, p] = run.parameters[i];
    const at::Tensor* g = find(muon.gradients, name);
    if (p.dim() != 2 || p.numel() == 0) {
      RC_ASSERT(same_bits(muon.parameters[i].second, adamw.parameters[i].second));
    } else if (g) {
      const double factor = std::sqrt(std::max(1.0, static_cast<double>(p.size(0)) / static_cast<double>(p.size(1))));
      const at::Tensor share = *g * (1 - o.momentum);
      const at::Tensor direction = golden::orthogonalized(share + share * o.momentum);
      const at::Tensor expected = p * (1 - o.lr * o.weight_decay) - direction * (o.lr * factor);
      RC_ASSERT(same_bits(muon.parameters[i].second, expected));
    }
  }
}

RC_GTEST_PROP(GoldenOptimizers, state_is_there_for_parameters_whose_rule_uses_it_and_no_others, ()) {
  const golden::Run run = random_family_run(any_model(), any_kind());
  const golden::Optimizer& o = run.optimizer;
  const auto expected = [&](const std::string& slot, const at::Tensor& p) {
    const bool by_muon = o.kind == Kind::muon && p.dim() == 2 && p.numel() > 0;
    if (slot == "momentum_buffer") return by_muon || (o.kind == Kind::sgd && o.momentum != 0);
    if (slot == "exp_avg") return o.kind != Kind::sgd && !by_muon;
    return o.kind != Kind::sgd && o.kind != Kind::lion && !by_muon;
  };
  const golden::Trace trace = golden::train(run);
  for (const char* slot : {"momentum_buffer", "exp_avg", "exp_avg_sq"}) {
    const golden::Named* held = nullptr;
    for (const auto& [name, tensors] : trace.back().state)
      if (name == slot) held = &tensors;
    size_t count = 0;
    for (const auto& [name, p] : run.parameters) {
      if (!expected(slot, p)) continue;
      ++count;
      RC_ASSERT(held != nullptr);
      RC_ASSERT(find(*held, name) != nullptr && find(*held, name)->sizes() == p.sizes());
    }
    RC_ASSERT((held ? held->size() : 0) == count);
  }
}

TEST(GoldenModels, the_parts_of_an_odd_model_can_be_left_out_one_by_one) {
  golden::Model model;
  model.kind = golden::Model::Kind::odd;
  const auto names = [&] {
    std::string joined;
    for (const auto& [name, shape] : golden::parameter_shapes(model)) joined += name + " ";
    return joined;
  };
  EXPECT_EQ(names(), "shared.weight shared.bias gain cube empty side.weight never ");
  model.odd.empty = model.odd.never = false;
  EXPECT_EQ(names(), "shared.weight shared.bias gain cube side.weight ");
  model.odd = {.width = 2, .gain = false, .cube = false, .empty = false, .side = false, .never = false};
  EXPECT_EQ(names(), "shared.weight shared.bias ");
}

RC_GTEST_PROP(GoldenModels, an_unused_parameter_has_a_zero_gradient_and_a_branch_not_taken_leaves_its_own_unused, ()) {
  golden::Model model = random_odd();
  model.odd.side = model.odd.never = true;
  golden::Run run = random_run(model);
  run.steps.resize(1);
  bool taken = false;
  for (auto& round : run.steps[0].microbatches)
    for (golden::Microbatch& m : round) taken |= m.branch = draw(0, 3) == 0;
  const golden::Named gradients = golden::train(run)[0].gradients;
  RC_ASSERT(at::all(*find(gradients, "never") == 0).item<bool>());
  RC_ASSERT(at::any(*find(gradients, "side.weight") != 0).item<bool>() == taken);
}

// Zero weights and biases: what is left is the head's bias.
TEST(GoldenModels, a_convolution_of_nothing_costs_the_squared_target) {
  golden::Run run;
  run.model.kind = golden::Model::Kind::conv;
  run.model.conv = {.channels = {2, 3}, .classes = 2};
  for (const auto& [name, shape] : golden::parameter_shapes(run.model)) run.parameters.emplace_back(name, at::zeros(shape));
  run.steps = {{.microbatches = {{{at::ones({2, 2, 4, 4}), at::full({2, 2}, 3.0f), 0.5}}}}};
  EXPECT_EQ(golden::train(run)[0].losses[0][0], 18);
}

TEST(GoldenRefusals, orders_dtypes_and_scales_that_make_no_sense) {
  const auto refused = [](auto change, const std::string& what) {
    golden::Run run = one_microbatch_run();
    change(run);
    expect_refused(run, what);
  };
  refused([](golden::Run& run) { run.order.shards = 2; }, "2 shards times 1 replicas are not the 1 ranks");
  refused([](golden::Run& run) { run.order.replicas = 0; }, "shards and replicas >= 1");
  refused([](golden::Run& run) { run.steps[0].reduce_after = {true, true}; }, "one of each of 1 rounds, got 2");
  refused([](golden::Run& run) { run.steps[0].divide_before = 0; }, "divide_before");
  refused([](golden::Run& run) { run.order.canonical = true, run.steps[0].divide_before = 2; }, "canonical");
  refused([](golden::Run& run) { run.steps[0].norm_order = 3; }, "norm_order");
  refused([](golden::Run& run) { run.steps[0].lr_factor = NAN; }, "lr_factor");
  refused([](golden::Run& run) { run.steps[0].frozen = {"layers.7.weight"}; }, "no parameter layers.7.weight");
  refused([](golden::Run& run) { run.precision.reduce = at::kLong; }, "reduce: expected Float");
  refused([](golden::Run& run) { run.scaling.initial = -1; }, "initial");
  refused([](golden::Run& run) { run.scaling = {.initial = 1, .growth_interval = 0}; }, "growth_interval");
  refused([](golden::Run& run) { run.optimizer.nesterov = true; }, "nesterov");
  refused([](golden::Run& run) { run.optimizer.groups = {{"weight", -1, 1}}; }, "lr_factor");
}

TEST(GoldenRefusals, models_of_the_family_that_cannot_be_built) {
  golden::Run run;
  run.model.kind = golden::Model::Kind::conv;
  run.model.conv = {.channels = {2, 3}, .kernel = 2};
  expect_refused(run, "kernel=2");
  run.model.conv = {.channels = {2}};
  expect_refused(run, "conv channels: expected at least two");
  run.model.kind = golden::Model::Kind::odd;
  run.model.odd.calls = 4;
  expect_refused(run, "calls=4");
}

}  // namespace
