// Scenarios of Megatron-LM's mfsdp_v1/test_mfsdp_fully_shard.py and mfsdp_v2/test_fully_shard.py. See docs/parity.md.
#include <gtest/gtest.h>
#include <torch/nn/modules/conv.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>

#include "properties/kit/parity_models.h"
#include "properties/kit/parity_training.h"

using namespace shardproof;
using parity::expect_near;
using parity::expect_trains_like_plain;
using parity::grid;
using parity::MakeTrainee;
using parity::on_mesh;
using parity::ranks;

namespace {

// Convolutions, then a linear map of the channels.
class ConvNetImpl : public torch::nn::Module {
 public:
  ConvNetImpl() {
    using torch::nn::Conv2dOptions;
    first = register_module("first", torch::nn::Conv2d(Conv2dOptions(3, 3, 3).padding(1)));
    second = register_module("second", torch::nn::Conv2d(Conv2dOptions(3, 2, 3).padding(1)));
    dense = register_module("dense", torch::nn::Linear(2, 1));
    initialize_parameters(*this, 8, 0.3);
  }
  at::Tensor forward(at::Tensor x) {
    x = at::tanh(call(second, at::tanh(call(first, x.view({-1, 3, 4, 4})))));
    return call(dense, x.permute({0, 2, 3, 1}).contiguous());
  }
  torch::nn::Conv2d first{nullptr}, second{nullptr};
  torch::nn::Linear dense{nullptr};
};
TORCH_MODULE(ConvNet);

MakeTrainee make_gpt() {
  return [] {
    Gpt gpt(GptOptions{.layers = 1, .hidden = 4, .heads = 2, .vocab = 11, .positions = 3, .tied = true});
    initialize_parameters(*gpt, 9, 0.3);
    return parity::Trainee{
        gpt.ptr(), [gpt](int64_t salt) mutable {
          return at::cross_entropy_loss(call(gpt, parity::tokens(salt)).view({-1, 11}), parity::tokens(salt + 1).flatten());
        }};
  };
}

}  // namespace

TEST(MegatronParity, every_strategy_trains_like_plain_on_every_mesh) {
  const std::vector<Mesh> meshes{ranks(3), grid(2, 2), grid(2, 1), grid(1, 2)};
  const std::vector<MakeTrainee> models{[] {
                                          return parity::trainee(parity::blocks(2, 3), {2, 3});
                                        },
                                        [] {
                                          return parity::trainee(ConvNet(), {2, 48});
                                        },
                                        make_gpt()};
  for (const Mesh& mesh : meshes)
    for (const Strategy& row : strategies()) {
      if (row.axes.size() == 2 && !mesh.has("dp_replicate")) continue;
      for (const int64_t microbatches : {1, 3})
        for (const MakeTrainee& make : models) {
          // Convolutions are slow to set up: once a strategy is enough.
          if (&make == &models[1] && (mesh.size() != 4 || microbatches == 1)) continue;
          parity::Plan plan{.mesh = mesh, .options = toy::options(row.name), .microbatches = microbatches};
          plan.options.units = by_type<parity::BlockImpl, torch::nn::Conv2dImpl, GptBlockImpl>();
          expect_trains_like_plain(make, plan);
        }
    }
}

TEST(MegatronParity, there_are_no_gradients_before_the_last_microbatch) {
  for (const Strategy& row : strategies())
    on_mesh(grid(2, 2), [&](std::shared_ptr<MeshComm> comms) {
      auto model = parity::blocks(2, 8);  // large enough for each rank to hold some of it
      Sharded sharded = fully_shard(model.ptr(), comms, toy::options(row.name));
      Optimizer optimizer = sgd(sharded, {.lr = 0.1});
      for (int64_t k = 0; k < 3; ++k) {
        sharded.set_last_microbatch(k == 2);
        call(model, toy::data({2, 8}, comms->rank() + k)).square().sum().backward();
        EXPECT_EQ(sharded.gradients().empty(), k < 2) << row.name << " microbatch " << k;
        for (const at::Tensor& parameter : model->parameters()) EXPECT_FALSE(parameter.grad().defined()) << row.name;
      }
      optimizer.step();
      EXPECT_TRUE(sharded.gradients().empty()) << row.name;
    });
}

TEST(MegatronParity, a_model_shards_with_default_options) {
  expect_trains_like_plain(
      [] {
        return parity::trainee(parity::blocks(2, 16), {2, 16});
      },
      {.mesh = ranks(2), .options = {}, .steps = 3, .tolerance = 1e-6});
}

TEST(MegatronParity, losses_under_adam_and_adamw_follow_plain_ones) {
  for (const bool decoupled : {false, true})
    for (const char* name : {"ddp", "zero2", "zero3"})
      on_mesh(ranks(2), [&](std::shared_ptr<MeshComm> comms) {
        auto model = parity::stack({5, 7, 3}), plain = parity::stack({5, 7, 3});
        Sharded sharded = fully_shard(model.ptr(), comms, toy::options(name));
        Optimizer optimizer =
            decoupled ? adamw(sharded, {.lr = 0.01, .weight_decay = 0.1}) : adam(sharded, {.lr = 0.01, .weight_decay = 0.1});
        torch::optim::AdamW plain_adamw(plain->parameters(), torch::optim::AdamWOptions(0.01).weight_decay(0.1));
        torch::optim::Adam plain_adam(plain->parameters(), torch::optim::AdamOptions(0.01).weight_decay(0.1));
        double first = 0, last = 0;
        for (int64_t step = 0; step < 10; ++step) {
          const at::Tensor loss = call(model, toy::data({4, 5}, comms->rank())).square().mean();
          plain->zero_grad();
          std::vector<at::Tensor> losses;
          for (int64_t rank = 0; rank < 2; ++rank) losses.push_back(plain->forward(toy::data({4, 5}, rank)).square().mean());
          last = losses[comms->rank()].item<double>();
          if (step == 0) first = last;
          EXPECT_NEAR(loss.item<double>(), last, 1e-5 * last) << name << " step " << step;
          ((losses[0] + losses[1]) / 2).backward();
          loss.backward();
          optimizer.step();
          decoupled ? plain_adamw.step() : plain_adam.step();
        }
        EXPECT_LT(last, 0.95 * first) << "it learned";
      });
}

TEST(MegatronParity, the_root_computes_on_gathered_parameters) {
  on_mesh(ranks(3), [](std::shared_ptr<MeshComm> comms) {
    torch::nn::Linear model(8, 8), plain(8, 8);
    initialize_parameters(*model, 1, 0.5);
    initialize_parameters(*plain, 1, 0.5);
    ShardOptions options = toy::options("zero3");
    options.units = {};
    Sharded sharded = fully_shard(model.ptr(), comms, options);
    expect_near(call(model, toy::data({4, 8}, 1)), plain(toy::data({4, 8}, 1)), 0, "output");
  });
}

TEST(MegatronParity, half_frozen_models_train_like_plain) {
  const MakeTrainee make = [] {
    parity::Trainee own = parity::trainee(parity::stack({4, 6, 6, 3}), {2, 4});
    for (size_t i = 0; i < 3; ++i) own.module->parameters()[i].requires_grad_(false);
    return own;
  };
  for (const char* name : {"ddp", "zero1", "zero2", "zero3"})
    for (const bool meta : {false, true}) {
      parity::Plan plan{.mesh = ranks(3), .options = toy::options(name), .steps = 3};
      plan.meta = meta;
      plan.options.initialize = normal_initializer(5, 0.5);
      plan.options.broadcast_initial_values = !meta;
      plan.on_start = [](Sharded& sharded) { EXPECT_EQ(sharded.gather_parameters().size(), 6u); };
      expect_trains_like_plain(make, plan);
    }
}
