// What a watch sees of the modules of a model, and that nothing changes because of it.
#include <gtest/gtest.h>

#include <cmath>

#include "properties/kit/expect_error.h"
#include "properties/kit/parity_models.h"
#include "properties/kit/parity_training.h"
#include "shardproof/hooks/module_watch.h"
#include "shardproof/models/lora.h"

using namespace shardproof;
using parity::on_mesh;

namespace {

Mlp mlp(std::vector<int64_t> widths = {4, 6, 3}) {
  Mlp model(MlpOptions{.widths = std::move(widths), .activation = Activation::tanh});
  const at::NoGradGuard no_grad;
  double start = 0;
  for (at::Tensor parameter : model->parameters())
    parameter.copy_(at::sin(at::arange(parameter.numel(), at::kFloat) * 0.37 + (start += 1)).view(parameter.sizes()));
  return model;
}

ShardOptions sharded(const std::string& strategy, bool recompute = false) {
  ShardOptions options = toy::options(strategy);
  options.units = by_name("layers.*");
  if (recompute) options.recompute = by_name("layers.*");
  return options;
}

// A layer that takes two tensors, and a model in which one that takes one comes after it.
struct ScaledLinearImpl : torch::nn::Module {
  ScaledLinearImpl() : weight(register_parameter("weight", toy::data({4, 4}, 1))) {}
  at::Tensor forward(const at::Tensor& input, const at::Tensor& scale) { return at::mm(input * scale, weight); }
  at::Tensor weight;
};
TORCH_MODULE(ScaledLinear);

struct AfterScaledImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& input) { return call(plain, call(scaled, input, input.abs())); }
  ScaledLinear scaled = register_module("scaled", ScaledLinear());
  torch::nn::Linear plain = register_module("plain", torch::nn::Linear(4, 3));
};
TORCH_MODULE(AfterScaled);

// Two layers that read the same, as projections of queries and keys do.
struct ForkImpl : torch::nn::Module {
  ForkImpl() {
    left->weight.set_data(toy::data({4, 4}, 1));
    right->weight.set_data(toy::data({4, 4}, 2));
  }
  at::Tensor forward(const at::Tensor& input) { return call(left, input) + 2 * call(right, input); }
  Linear left = register_module("left", Linear(torch::nn::LinearOptions(4, 4).bias(false)));
  Linear right = register_module("right", Linear(torch::nn::LinearOptions(4, 4).bias(false)));
};
TORCH_MODULE(Fork);

struct WithForkImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& input) { return call(fork, input); }
  Fork fork = register_module("fork", Fork());
};
TORCH_MODULE(WithFork);

// One layer, called twice.
struct TwiceImpl : torch::nn::Module {
  TwiceImpl() { layer->weight.set_data(toy::data({4, 4}, 1)); }
  at::Tensor forward(const at::Tensor& input) { return call(layer, call(layer, input).tanh()); }
  Linear layer = register_module("layer", Linear(torch::nn::LinearOptions(4, 4).bias(false)));
};
TORCH_MODULE(Twice);

struct WithTwiceImpl : torch::nn::Module {
  at::Tensor forward(const at::Tensor& input) { return call(twice, input); }
  Twice twice = register_module("twice", Twice());
};
TORCH_MODULE(WithTwice);

// The calls of one forward and backward.
template <class Model>
std::vector<ModuleCall> seen(Model& model, const at::Tensor& input) {
  ModuleWatch watch(*model);
  watch.begin();
  const at::Tensor output = call(model, input);
  watch.begin_backward();
  output.square().sum().backward();
  return watch.calls();
}

}  // namespace

TEST(ModuleWatch, sees_what_each_module_reads_and_gives_and_the_gradient_that_comes_back) {
  Mlp model = mlp();
  const at::Tensor input = toy::data({2, 4}, 0);
  const std::vector<ModuleCall> calls = seen(model, input);
  ASSERT_EQ(calls.size(), 2u);
  const auto parameters = model->named_parameters();
  const at::Tensor first = at::linear(input, parameters["layers.0.weight"], parameters["layers.0.bias"]).detach();
  const at::Tensor second = at::linear(first.tanh(), parameters["layers.1.weight"], parameters["layers.1.bias"]).detach();
  EXPECT_EQ(calls[0].module, "layers.0");
  EXPECT_TRUE(calls[0].input.equal(input) && calls[0].output.equal(first));
  EXPECT_EQ(calls[1].module, "layers.1");
  EXPECT_TRUE(calls[1].input.equal(first.tanh()) && calls[1].output.equal(second));
  EXPECT_TRUE(calls[1].output_gradient.equal(2 * second));
  const at::Tensor to_first = at::mm(2 * second, parameters["layers.1.weight"].detach()) * (1 - first.tanh().square());
  EXPECT_TRUE(at::allclose(calls[0].output_gradient, to_first));
  ASSERT_EQ(calls[1].parameters.size(), 2u);
  EXPECT_EQ(calls[1].parameters[0].first, "layers.1.weight");
  EXPECT_TRUE(calls[1].parameters[0].second.equal(parameters["layers.1.weight"]));
}

TEST(ModuleWatch, sees_the_same_on_each_rank_of_a_sharded_model_and_a_recomputation_is_no_second_call) {
  for (const bool recompute : {false, true}) {
    Mlp plain = mlp({4, 6, 5, 5, 3});
    const std::vector<ModuleCall> golden = seen(plain, toy::data({2, 4}, 0));
    on_mesh(Mesh::parse("dp_shard=2"), [&](std::shared_ptr<MeshComm> comms) {
      Mlp model = mlp({4, 6, 5, 5, 3});
      Sharded handle = fully_shard(model.ptr(), comms, sharded("zero3", recompute));
      const std::vector<ModuleCall> calls = seen(model, toy::data({2, 4}, 0));
      ASSERT_EQ(calls.size(), golden.size());
      for (size_t i = 0; i < calls.size(); ++i) {
        EXPECT_EQ(calls[i].module, golden[i].module);
        EXPECT_TRUE(calls[i].input.equal(golden[i].input) && calls[i].output.equal(golden[i].output)) << i;
        ASSERT_TRUE(calls[i].output_gradient.defined()) << i << " recompute " << recompute;
        EXPECT_TRUE(calls[i].output_gradient.equal(golden[i].output_gradient)) << i;
        for (size_t k = 0; k < calls[i].parameters.size(); ++k)
          EXPECT_TRUE(calls[i].parameters[k].second.equal(golden[i].parameters[k].second)) << "gathered, " << i;
      }
    });
  }
}

TEST(ModuleWatch, layers_that_read_the_same_have_each_their_gradient_when_they_are_computed_again) {
  WithFork plain;
  const std::vector<ModuleCall> golden = seen(plain, toy::data({2, 4}, 0));
  on_mesh(Mesh::parse("dp_shard=2"), [&](std::shared_ptr<MeshComm> comms) {
    WithFork model;
    ShardOptions options = toy::options("zero3");
    options.units = options.recompute = by_name("fork");
    Sharded handle = fully_shard(model.ptr(), comms, options);
    const std::vector<ModuleCall> calls = seen(model, toy::data({2, 4}, 0));
    ASSERT_EQ(calls.size(), golden.size());
    for (size_t i = 0; i < calls.size(); ++i) {
      EXPECT_EQ(calls[i].module, golden[i].module);
      ASSERT_TRUE(calls[i].output_gradient.defined()) << calls[i].module;
      EXPECT_TRUE(calls[i].output_gradient.equal(golden[i].output_gradient)) << calls[i].module;
    }
  });
}

TEST(ModuleWatch, a_call_with_nan_is_found_again_when_it_is_computed_again) {
  on_mesh(Mesh::parse("dp_shard=2"), [&](std::shared_ptr<MeshComm> comms) {
    Mlp model = mlp();
    ShardOptions options = sharded("zero3", /*recompute=*/true);
    options.check_gradients = false;
    Sharded handle = fully_shard(model.ptr(), comms, options);
    const std::vector<ModuleCall> calls = seen(model, at::full({2, 4}, NAN));
    ASSERT_EQ(calls.size(), 2u);
    for (const ModuleCall& call : calls) EXPECT_TRUE(call.output_gradient.defined()) << call.module;
  });
}

TEST(ModuleWatch, two_calls_with_nan_in_one_row_have_each_their_gradient_when_they_are_computed_again) {
  at::Tensor input = toy::data({2, 4}, 0);
  input[1].fill_(NAN);
  WithTwice plain;
  const std::vector<ModuleCall> golden = seen(plain, input);
  ASSERT_FALSE(golden.at(0).output_gradient[0].equal(golden.at(1).output_gradient[0]));
  on_mesh(Mesh::parse("dp_shard=2"), [&](std::shared_ptr<MeshComm> comms) {
    WithTwice model;
    ShardOptions options = toy::options("zero3");
    options.units = options.recompute = by_name("twice");
    options.check_gradients = false;
    Sharded handle = fully_shard(model.ptr(), comms, options);
    const std::vector<ModuleCall> calls = seen(model, input);
    ASSERT_EQ(calls.size(), 2u);
    for (size_t i = 0; i < 2; ++i) {
      ASSERT_TRUE(calls[i].output_gradient.defined()) << i;
      EXPECT_TRUE(calls[i].output_gradient[0].equal(golden[i].output_gradient[0])) << i;
    }
  });
}

TEST(ModuleWatch, counts_the_calls_of_a_module_and_each_has_a_gradient_of_its_own) {
  Mlp model = mlp({4, 4, 4});
  ModuleWatch watch(*model);
  watch.begin();
  const at::Tensor once = call(model, toy::data({2, 4}, 0)), twice = call(model, once), thrice = call(model, twice);
  watch.begin_backward();
  (3 * thrice).sum().backward();
  ASSERT_EQ(watch.calls().size(), 6u);
  const std::vector<at::Tensor> outputs{once, twice, thrice};
  for (size_t i = 0; i < 6; ++i) {
    const ModuleCall& call = watch.calls()[i];
    EXPECT_EQ(call.module, i % 2 == 0 ? "layers.0" : "layers.1");
    EXPECT_EQ(call.number, static_cast<int64_t>(i / 2));
    if (i % 2 == 1) {
      EXPECT_TRUE(call.output.equal(outputs[i / 2].detach()));
    }
  }
  const at::Tensor x = twice.detach().requires_grad_(true);
  (3 * model->forward(x)).sum().backward();
  EXPECT_TRUE(watch.calls()[3].output_gradient.equal(x.grad()));
  EXPECT_TRUE(watch.calls()[5].output_gradient.equal(at::full({2, 4}, 3.0f)));
}

TEST(ModuleWatch, a_module_that_is_called_again_and_computed_again_has_each_gradient_with_its_own_call) {
  const auto calls_of = [](Mlp& model) {
    ModuleWatch watch(*model);
    watch.begin();
    at::Tensor x = toy::data({2, 4}, 0);
    for (int64_t i = 0; i < 3; ++i) x = call(model, x);
    watch.begin_backward();
    (3 * x).sum().backward();
    return watch.calls();
  };
  Mlp plain = mlp({4, 4, 4});
  const std::vector<ModuleCall> expected = calls_of(plain);
  on_mesh(Mesh::parse("dp_shard=2"), [&](std::shared_ptr<MeshComm> comms) {
    Mlp model = mlp({4, 4, 4});
    Sharded handle = fully_shard(model.ptr(), comms, sharded("zero3", /*recompute=*/true));
    const std::vector<ModuleCall> calls = calls_of(model);
    ASSERT_EQ(calls.size(), expected.size());
    for (size_t i = 0; i < calls.size(); ++i) {
      EXPECT_TRUE(calls[i].input.equal(expected[i].input)) << i;
      ASSERT_TRUE(calls[i].output_gradient.defined()) << i;
      EXPECT_TRUE(calls[i].output_gradient.equal(expected[i].output_gradient)) << i;
    }
  });
}

TEST(ModuleWatch, changes_no_bit_of_a_step) {
  on_mesh(Mesh::parse("dp_shard=2"), [](std::shared_ptr<MeshComm> comms) {
    std::vector<std::vector<at::Tensor>> gradients;
    for (const bool watched : {false, true}) {
      Mlp model = mlp();
      Sharded handle = fully_shard(model.ptr(), comms, sharded("zero3"));
      std::optional<ModuleWatch> watch;
      if (watched) watch.emplace(*model);
      call(model, toy::data({2, 4}, comms->rank())).square().sum().backward();
      gradients.emplace_back();
      for (const Piece& piece : handle.gradients()) gradients.back().push_back(piece.data.clone());
    }
    ASSERT_EQ(gradients[0].size(), gradients[1].size());
    for (size_t i = 0; i < gradients[0].size(); ++i) EXPECT_TRUE(gradients[0][i].equal(gradients[1][i]));
  });
}

TEST(ModuleWatch, forgets_with_each_forward_notes_what_it_is_told_to_and_ends_with_its_object) {
  Mlp model = mlp();
  int64_t asked = 0;
  {
    ModuleWatch watch(*model, [&] { return std::to_string(asked++); });
    for (int64_t forward = 0; forward < 2; ++forward) {
      watch.begin();
      call(model, toy::data({2, 4}, 0));
      ASSERT_EQ(watch.calls().size(), 2u);
      EXPECT_EQ(watch.calls()[1].note, std::to_string(2 * forward + 1));
      EXPECT_EQ(watch.calls()[1].number, 0);
    }
    expect_error([&] { ModuleWatch again(*model); }, {"module 'layers.0' is watched already"});
    call(model, toy::data({2, 4}, 0));
    EXPECT_EQ(asked, 6) << "the watch that was refused changed nothing";
  }
  call(model, toy::data({2, 4}, 0));
  EXPECT_EQ(asked, 6);
}

TEST(ModuleWatch, leaves_layers_with_adapters_to_their_adapters) {
  Mlp model = mlp();
  const Lora lora = add_lora(model.ptr(), {.rank = 2, .targets = {"layers.0"}});
  const std::vector<ModuleCall> calls = seen(model, toy::data({2, 4}, 0));
  std::vector<std::string> names;
  for (const ModuleCall& call : calls) names.push_back(call.module);
  EXPECT_EQ(names, (std::vector<std::string>{"layers.0.lora_A", "layers.0.lora_B", "layers.1"}));
}

TEST(ModuleWatch, lets_a_module_that_takes_two_tensors_pass_unseen_and_sees_the_others) {
  AfterScaled model;
  const at::Tensor input = toy::data({2, 4}, 0);
  const std::vector<ModuleCall> calls = seen(model, input);
  ASSERT_EQ(calls.size(), 1u);
  EXPECT_EQ(calls[0].module, "plain");
  EXPECT_TRUE(calls[0].input.equal(at::mm(input * input.abs(), model->scaled->weight).detach()));
  EXPECT_TRUE(model->scaled->weight.grad().defined());
}
