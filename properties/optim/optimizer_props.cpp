// The update rules against LibTorch's own operations, one IEEE operation at a time, and against torch's optimizers.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <cmath>
#include <random>

#include "shardproof/base/check.h"
#include "shardproof/optim/optimizer.h"

using namespace shardproof;

namespace {

std::vector<float> normal(size_t count, uint32_t seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> draw;
  std::vector<float> values(count);
  for (float& value : values) value = draw(engine);
  return values;
}

// Runs the rule in pieces cut at `cut`, as another mesh would.
std::vector<float> run(const UpdateRule& rule, size_t count, size_t cut, int64_t steps) {
  const std::string name = "p";
  const Shape shape{static_cast<int64_t>(count)};
  std::vector<float> parameter = normal(count, 1);
  std::vector<std::vector<float>> state(rule.state_names().size(), std::vector<float>(count, 0.0f));
  for (int64_t step = 1; step <= steps; ++step) {
    std::vector<float> gradient = normal(count, 100 + step);
    for (const auto& [begin, end] : {std::pair<size_t, size_t>{0, cut}, {cut, count}}) {
      const auto part = [&, begin = begin, end = end](std::vector<float>& values) {
        return at::from_blob(values.data() + begin, {static_cast<int64_t>(end - begin)});
      };
      Update update{
          .name = name, .shape = shape, .parameter = part(parameter), .gradient = part(gradient), .state = {}, .step = step};
      for (auto& state_name : state) update.state.push_back(part(state_name));
      rule.update(update);
    }
  }
  return parameter;
}

template <class TorchOptimizer, class Options>
void expect_close_to_torch(const UpdateRule& rule, Options options) {
  const size_t count = 1000;
  const std::vector<float> initial = normal(count, 1);
  at::Tensor parameter = at::tensor(initial).to(at::kDouble).requires_grad_(true);
  TorchOptimizer optimizer({parameter}, options);
  for (int64_t step = 1; step <= 7; ++step) {
    parameter.mutable_grad() = at::tensor(normal(count, 100 + step)).to(at::kDouble);
    optimizer.step();
  }
  const at::Tensor ours = at::tensor(run(rule, count, 0, 7)).to(at::kDouble);
  const double error = (ours - parameter.detach()).norm().item<double>() / parameter.detach().norm().item<double>();
  // A handful of float32 roundings a step, in units of 2^-24, over 7 steps.
  EXPECT_LT(error, 7 * 8 * std::ldexp(1, -24));
  EXPECT_GT((ours - at::tensor(initial).to(at::kDouble)).norm().item<double>(), 0.01) << "it moved";
}

}  // namespace

TEST(UpdateRules, results_do_not_depend_on_where_a_shard_is_cut) {
  for (const auto& rule : {make_rule(AdamWOptions{.lr = 0.01, .weight_decay = 0.1}),
                           make_rule(AdamOptions{.lr = 0.01, .weight_decay = 0.1}),
                           make_rule(LionOptions{.lr = 0.01, .weight_decay = 0.1}),
                           make_rule(SgdOptions{.lr = 0.1, .momentum = 0.9, .nesterov = true, .weight_decay = 0.01})}) {
    for (const size_t count : {1u, 7u, 64u, 257u}) {
      const std::vector<float> whole = run(*rule, count, 0, 5);
      for (size_t cut = 1; cut <= count; cut += 3) EXPECT_EQ(run(*rule, count, cut, 5), whole) << "cut at " << cut;
    }
  }
}

TEST(UpdateRules, sgd_is_torch_sgd) {
  expect_close_to_torch<torch::optim::SGD>(*make_rule(SgdOptions{.lr = 0.1, .momentum = 0.9, .weight_decay = 0.01}),
                                           torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01));
  expect_close_to_torch<torch::optim::SGD>(*make_rule(SgdOptions{.lr = 0.1}), torch::optim::SGDOptions(0.1));
}

TEST(UpdateRules, nesterov_is_torch_sgd_with_nesterov) {
  expect_close_to_torch<torch::optim::SGD>(*make_rule(SgdOptions{.lr = 0.1, .momentum = 0.9, .nesterov = true}),
                                           torch::optim::SGDOptions(0.1).momentum(0.9).nesterov(true));
}

TEST(UpdateRules, adam_is_torch_adam) {
  expect_close_to_torch<torch::optim::Adam>(*make_rule(AdamOptions{.lr = 0.01, .weight_decay = 0.1}),
                                            torch::optim::AdamOptions(0.01).weight_decay(0.1));
}

TEST(UpdateRules, adamw_is_torch_adamw) {
  expect_close_to_torch<torch::optim::AdamW>(
      *make_rule(AdamWOptions{.lr = 0.01, .beta1 = 0.8, .beta2 = 0.95, .eps = 1e-6, .weight_decay = 0.1}),
      torch::optim::AdamWOptions(0.01).betas({0.8, 0.95}).eps(1e-6).weight_decay(0.1));
}

TEST(UpdateRules, low_precision_is_computed_in_float32_and_rounded_once_a_step) {
  const std::string name = "p";
  const Shape shape{40};
  for (const auto& rule : {make_rule(SgdOptions{.lr = 0.1, .momentum = 0.9}), make_rule(AdamWOptions{.lr = 0.1}),
                           make_rule(AdamOptions{.lr = 0.1}), make_rule(LionOptions{.lr = 0.1})})
    for (const at::ScalarType low : {at::kBFloat16, at::kHalf}) {
      const auto zeros = [&] { return std::vector<at::Tensor>(rule->state_names().size()); };
      Update update{
          .name = name, .shape = shape, .parameter = at::sin(at::arange(40.0)).to(low), .gradient = {}, .state = zeros()};
      for (at::Tensor& state : update.state) state = at::zeros({40}, low);
      for (update.step = 1; update.step <= 3; ++update.step) {
        update.gradient = at::cos(at::arange(40.0) * static_cast<double>(update.step)).to(low);
        Update wide{.name = name,
                    .shape = shape,
                    .parameter = update.parameter.to(at::kFloat),
                    .gradient = update.gradient.to(at::kFloat),
                    .state = zeros(),
                    .step = update.step};
        for (size_t i = 0; i < wide.state.size(); ++i) wide.state[i] = update.state[i].to(at::kFloat);
        rule->update(wide);
        rule->update(update);
        EXPECT_TRUE(at::equal(update.parameter, wide.parameter.to(low))) << "step " << update.step;
        for (size_t i = 0; i < wide.state.size(); ++i) EXPECT_TRUE(at::equal(update.state[i], wide.state[i].to(low)));
      }
      EXPECT_FALSE(at::equal(update.parameter, at::sin(at::arange(40.0)).to(low))) << "nothing has moved";
    }
}

TEST(UpdateRules, options_out_of_range_are_refused_by_name) {
  for (const auto& bad :
       {AdamWOptions{.lr = -1}, AdamWOptions{.beta1 = 1}, AdamWOptions{.beta2 = NAN}, AdamWOptions{.eps = -1}})
    EXPECT_THROW(make_rule(bad), Error);
  EXPECT_THROW(make_rule(SgdOptions{.momentum = -0.1}), Error);
}
