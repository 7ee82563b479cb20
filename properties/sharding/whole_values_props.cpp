// Whole values by name: what is written is what ranks then have, and train with.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <map>

#include "properties/kit/bits.h"
#include "properties/kit/drawn_sharding.h"
#include "properties/kit/expect_error.h"
#include "properties/kit/toy_modules.h"

using namespace shardproof;
using Values = std::map<std::string, at::Tensor>;

namespace {

// Equal on every rank, and different for each name and salt. Main parameters in bfloat16's numbers stay what they are.
at::Tensor value_of(const std::string& name, at::IntArrayRef sizes, int64_t salt) {
  const auto hash = static_cast<int64_t>(std::hash<std::string>{}(name) % 1000);
  return (at::arange(at::numel(at::empty(sizes)), at::kFloat) * 0.37 + static_cast<double>(hash + salt)).sin().view(sizes);
}

Values values_like(const Values& those, int64_t salt) {
  Values values;
  for (const auto& [name, value] : those) values[name] = value_of(name, value.sizes(), salt);
  return values;
}

void expect_equal(const Values& found, const Values& wanted, const std::string& where) {
  ASSERT_EQ(found.size(), wanted.size()) << where;
  for (const auto& [name, value] : wanted) EXPECT_TRUE(kit::same_bits(found.at(name), value)) << where << " " << name;
}

void step(const kit::DrawnModel& model, Sharded& sharded, Optimizer& optimizer, bool writes) {
  const at::Tensor tokens = at::arange(16, at::kLong).remainder(13).view({2, 8});
  model.forward(tokens).to(at::kFloat).square().sum().backward();
  if (writes) sharded.write_gradients(values_like(sharded.gather_gradients(), 3));
  optimizer.step();
}

Sharded sharded_linear(torch::nn::Linear& linear, const std::shared_ptr<Comm>& world) {
  initialize_parameters(*linear, 7, 0.3);
  return fully_shard(linear.ptr(), std::make_shared<MeshComm>(world, Mesh({{"dp_shard", 2}})), toy::options("zero3"));
}

// Writes everything that a step works on, and takes the step.
void expect_written(const kit::DrawnSharding& d) {
  run_threads(d.mesh.size(), [&](std::shared_ptr<Comm> world) {
    const auto comms = std::make_shared<MeshComm>(std::move(world), d.mesh);
    const kit::DrawnModel model = d.make();
    const auto parallel = d.cut(model, comms);
    Sharded sharded = fully_shard(model.module, comms, d.options());
    Optimizer optimizer = sgd(sharded, {.lr = 0.5, .momentum = 0.5});
    step(model, sharded, optimizer, false);  // there is state from now on

    const Values parameters = values_like(sharded.gather_main_parameters(), 1);
    const Values state = values_like(optimizer.gather_state("momentum_buffer"), 2);
    sharded.write_parameters(parameters);
    optimizer.write_state("momentum_buffer", state);
    expect_equal(sharded.gather_main_parameters(), parameters, d.str());
    expect_equal(optimizer.gather_state("momentum_buffer"), state, d.str());
    for (const auto& [name, value] : sharded.gather_parameters())
      if (const auto found = parameters.find(name); found != parameters.end()) {
        EXPECT_TRUE(kit::same_bits(value, found->second.to(at::kBFloat16))) << d.str() << " " << name;
      }

    step(model, sharded, optimizer, true);
    Values moved, expected;
    for (const auto& [name, value] : sharded.gather_main_parameters()) {
      const at::Tensor momentum = state.at(name) * 0.5 + value_of(name, value.sizes(), 3);
      moved[name] = value;
      expected[name] = parameters.at(name) - momentum * 0.5;
    }
    expect_equal(moved, expected, d.str());
  });
}

}  // namespace

RC_GTEST_PROP(WholeValues, that_are_written_are_gathered_again_and_trained_with, ()) {
  const kit::DrawnSharding d = kit::drawn_sharding();
  expect_written(d);
  if (::testing::Test::HasFailure()) RC_FAIL(d.str());
}

TEST(WholeValues, of_some_names_leave_the_others_as_they_are) {
  run_threads(2, [](std::shared_ptr<Comm> world) {
    torch::nn::Linear linear(3, 4);
    Sharded sharded = sharded_linear(linear, world);
    const at::Tensor bias = sharded.gather_main_parameters().at("bias");
    sharded.write_parameters({{"weight", at::ones({4, 3}, at::kDouble)}});
    const Values now = sharded.gather_main_parameters();
    EXPECT_TRUE(kit::same_bits(now.at("weight"), at::ones({4, 3})));
    EXPECT_TRUE(kit::same_bits(now.at("bias"), bias));
  });
}

// Ranks that pass different names, each of which is known.
TEST(WholeValues, of_other_names_on_one_rank_are_refused_on_every_rank) {
  run_threads(2, [](std::shared_ptr<Comm> world) {
    torch::nn::Linear linear(3, 4);
    Sharded sharded = sharded_linear(linear, world);
    Optimizer optimizer = sgd(sharded, {.lr = 0.5, .momentum = 0.5});
    const Values before = sharded.gather_main_parameters();
    const Values both = values_like(before, 1), one{{"bias", both.at("bias")}};
    const Values& given = world->rank() == 0 ? both : one;
    expect_error([&] { sharded.write_parameters(given); },
                 {"write_parameters: rank 0 passes 2 names", "and rank 1 1 names"});
    expect_equal(sharded.gather_main_parameters(), before, "after a refusal");
    expect_error([&] { optimizer.write_state(world->rank() == 0 ? "momentum_buffer" : "exp_avg", both); },
                 {"no state called 'exp_avg'", "rank 1"});
  });
}

// A file that rank 0 alone has read would be written in pieces of two models.
TEST(WholeValues, that_differ_between_ranks_are_refused_on_every_rank) {
  run_threads(2, [](std::shared_ptr<Comm> world) {
    torch::nn::Linear linear(3, 4);
    Sharded sharded = sharded_linear(linear, world);
    const Values before = sharded.gather_main_parameters();
    expect_error([&] { sharded.write_parameters(values_like(before, world->rank() + 1)); },
                 {"write_parameters: rank 0 passes 2 names", "their values", "and rank 1 2 names", "whole values on every"});
    expect_equal(sharded.gather_main_parameters(), before, "after a refusal");
  });
}

TEST(WholeValues, too_large_for_the_models_dtype_are_refused) {
  run_threads(2, [](std::shared_ptr<Comm> world) {
    torch::nn::Linear linear(3, 4);
    linear->to(at::kHalf);
    Sharded sharded = sharded_linear(linear, world);
    expect_error([&] { sharded.write_parameters({{"bias", at::full({4}, 1e6)}}); },
                 {"bias", "4 of its values", "float16", "1000000"});
    sharded.write_parameters({{"bias", at::full({4}, 1e3)}});
    EXPECT_EQ(sharded.gather_main_parameters().at("bias").sum().item<double>(), 4e3);
  });
}

// One at a time, by any of its names; a misspelt name, or another one on some rank, is refused on every rank.
TEST(WholeValues, of_one_name_are_gathered_alone_and_refused_when_ranks_ask_for_others) {
  run_threads(2, [](std::shared_ptr<Comm> world) {
    torch::nn::Linear linear(3, 4);
    Sharded sharded = sharded_linear(linear, world);
    Optimizer optimizer = sgd(sharded, {.lr = 0.5, .momentum = 0.5});
    expect_error([&] { sharded.gather_gradient("weight"); },
                 {"gather_gradient needs the gradients of the last backward", "has none: no backward has run. Run a backward"});
    expect_error([&] { sharded.gather_gradients(); }, {"gather_gradients needs the gradients of the last backward"});
    call(linear, at::ones({2, 3})).square().sum().backward();
    const Values parameters = sharded.gather_main_parameters(), gradients = sharded.gather_gradients();
    for (const std::string name : {"weight", "bias"}) {
      EXPECT_TRUE(kit::same_bits(sharded.gather_main_parameter(name), parameters.at(name))) << name;
      EXPECT_TRUE(kit::same_bits(sharded.gather_gradient(name), gradients.at(name))) << name;
    }
    optimizer.step();
    EXPECT_TRUE(kit::same_bits(optimizer.gather_state("momentum_buffer", "bias"), gradients.at("bias")));
    const std::string other = world->rank() == 1 ? "wieght" : "weight";
    expect_error([&] { sharded.gather_main_parameter(other); }, {"no parameter 'wieght'. Did you mean 'weight'?", "rank 1"});
    const std::string one = world->rank() == 1 ? "bias" : "weight";
    expect_error([&] { sharded.gather_main_parameter(one); }, {"rank 0 asks for weight, and rank 1 for bias"});
    expect_error([&] { optimizer.gather_state("momentum_bufer", "bias"); }, {"Did you mean 'momentum_buffer'?"});
  });
}

TEST(WholeValues, of_gradients_that_are_not_there_say_why_and_what_to_do) {
  run_threads(2, [](std::shared_ptr<Comm> world) {
    torch::nn::Linear linear(3, 4);
    linear->bias.set_requires_grad(false);
    Sharded sharded = sharded_linear(linear, world);
    Optimizer optimizer = sgd(sharded, {.lr = 0.5});
    const auto backward = [&](bool last) {
      sharded.set_last_microbatch(last);
      call(linear, at::ones({2, 3})).square().sum().backward();
    };
    const auto asked = [&](const std::string& says) { expect_error([&] { sharded.gather_gradient("weight"); }, {says}); };
    backward(/*last=*/false);
    asked("has none: the last microbatch has not run. Run a backward with set_last_microbatch(true)");
    backward(/*last=*/true);
    EXPECT_EQ(sharded.gather_gradient("weight").sizes(), (std::vector<int64_t>{4, 3}));
    expect_error([&] { sharded.gather_gradient("bias"); },
                 {"gather_gradient: the parameter 'bias' is frozen (its requires_grad is false), so it has none"});
    optimizer.step();
    asked("has none: the optimizer's step has taken them. Call this before it, or after the next backward");
    sharded.zero_gradients();
    asked("the optimizer's step has taken them");
    backward(/*last=*/true);
    sharded.zero_gradients();
    asked("zero_gradients has taken them");
    backward(/*last=*/true);
    sharded.skip_step();
    asked("skip_step has taken them");
  });
}

TEST(WholeValues, are_refused_inside_a_backward) {
  run_threads(2, [](std::shared_ptr<Comm> world) {
    torch::nn::Linear linear(3, 4);
    Sharded sharded = sharded_linear(linear, world);
    Optimizer optimizer = sgd(sharded, {.lr = 0.5, .momentum = 0.5});
    at::Tensor x = at::ones({2, 3}).requires_grad_();
    int64_t asked = 0;
    x.register_hook([&](const at::Tensor& gradient) {
      const std::vector<std::function<void()>> calls = {[&] { sharded.gather_main_parameters(); },
                                                        [&] { sharded.gather_gradients(); },
                                                        [&] { sharded.write_parameters({}); },
                                                        [&] { optimizer.gather_state("momentum_buffer"); },
                                                        [&] { optimizer.write_state("momentum_buffer", {}); }};
      for (const auto& act : calls) expect_error(act, {"inside a backward (rank ", "call it after"});
      expect_error([&] { sharded.zero_gradients(); }, {"zero_gradients inside a backward (rank "});
      expect_error([&] { sharded.skip_step(); }, {"skip_step inside a backward (rank "});
      ++asked;
      return gradient;
    });
    call(linear, x).square().sum().backward();
    EXPECT_EQ(asked, 1);
    optimizer.step();
  });
}

// One rank alone passes what does not fit; all ranks throw, and nothing is written.
TEST(WholeValues, that_fit_nothing_on_one_rank_are_refused_on_every_rank) {
  const auto refuses = [](const Values& of_rank_1, const std::string& says) {
    run_threads(2, [&](std::shared_ptr<Comm> world) {
      torch::nn::Linear linear(3, 4);
      Sharded sharded = sharded_linear(linear, world);
      Optimizer optimizer = sgd(sharded, {.lr = 0.5, .momentum = 0.5});
      const Values before = sharded.gather_main_parameters();
      const Values values = world->rank() == 1 ? of_rank_1 : Values{{"weight", at::ones({4, 3})}};
      expect_error([&] { sharded.write_parameters(values); }, {"[fully_shard] write_parameters: ", says, "rank 1"});
      expect_error([&] { optimizer.write_state("momentum_buffer", values); }, {"[fully_shard] write_state: ", says});
      expect_equal(sharded.gather_main_parameters(), before, "after a refusal");
    });
  };
  refuses({{"wieght", at::ones({4, 3})}}, "there is no parameter 'wieght'. Did you mean 'weight'?");
  refuses({{"weight", at::ones({3, 4})}}, "weight must have sizes [4,3], got [3,4]");
  refuses({{"weight", at::ones({4, 3}, at::kLong)}}, "floating point");
  refuses({{"weight", at::Tensor()}}, "no tensor");
}
