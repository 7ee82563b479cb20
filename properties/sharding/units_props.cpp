// Scenarios of Megatron-LM's mfsdp_v2/test_fully_shard.py: what units hold and when they talk. See docs/parity.md.
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/optim/adam.h>

#include <cmath>

#include "properties/kit/parity_models.h"
#include "properties/kit/parity_training.h"
#include "shardproof/comm/traced.h"

using namespace shardproof;
using parity::calls_of;
using parity::expect_near;
using parity::expect_trains_like_plain;
using parity::grid;
using parity::MakeTrainee;
using parity::on_mesh;
using parity::ranks;

TEST(MegatronParity, recomputation_leaves_every_unit_sharded) {
  for (const int64_t ahead : {0, 1, 2})
    on_mesh(ranks(2), [&](std::shared_ptr<MeshComm> comms) {
      auto model = parity::blocks(3, 4);
      ShardOptions options = parity::block_units("zero3");
      options.recompute = options.units;
      options.prefetch_forward = ahead;
      options.prefetch_backward = ahead;
      Sharded sharded = fully_shard(model.ptr(), comms, options);
      for (int64_t round = 0; round < 2; ++round) {
        call(model, toy::data({2, 4}, 1).requires_grad_(true)).sum().backward();
        for (const UnitHandle& unit : sharded.units()) EXPECT_FALSE(unit.is_unsharded()) << unit.name() << " round " << round;
        for (const at::Tensor& parameter : model->parameters()) EXPECT_FALSE(parity::has_memory(parameter));
        sharded.zero_gradients();
      }
    });
}

TEST(MegatronParity, recomputation_gathers_nothing_ahead) {
  // Units within recomputed units, which would otherwise gather the next ones once more.
  std::vector<int64_t> gathers;
  for (const int64_t ahead : {0, 1, 2}) {
    auto trace = std::make_shared<Trace>();
    on_mesh(
        ranks(2),
        [&](std::shared_ptr<MeshComm> comms) {
          auto model = parity::blocks(3, 4);
          ShardOptions options = toy::options("zero3");
          options.units = by_type<parity::BlockImpl, torch::nn::LinearImpl>();
          options.recompute = by_type<parity::BlockImpl>();
          options.prefetch_forward = ahead;
          Sharded sharded = fully_shard(model.ptr(), comms, options);
          call(model, toy::data({2, 4}, 1)).sum().backward();
        },
        {}, trace);
    gathers.push_back(calls_of(*trace, 0)["all_gather"]);
  }
  EXPECT_EQ(gathers, std::vector<int64_t>(3, gathers[0]));
}

TEST(Units, within_recomputed_units_are_freed_before_the_backward_of_the_next_one) {
  constexpr int64_t kWidth = 32, kBlock = 2 * (kWidth * kWidth + kWidth) * 4;
  for (const bool frozen : {false, true})
    on_mesh(ranks(2), [&](std::shared_ptr<MeshComm> comms) {
      auto model = parity::blocks(4, kWidth);
      if (frozen)
        for (at::Tensor parameter : model->parameters()) parameter.set_requires_grad(parameter.dim() == 2);
      ShardOptions options = toy::options("zero3");
      options.units = by_type<parity::BlockImpl, torch::nn::LinearImpl>();
      options.recompute = by_type<parity::BlockImpl>();
      Sharded sharded = fully_shard(model.ptr(), comms, options);
      const at::Tensor loss = call(model, toy::data({2, kWidth}, 1).requires_grad_(true)).sum();
      sharded.reset_peak_memory();
      loss.backward();
      EXPECT_LE(sharded.memory().peak(MemoryKind::gathered), kBlock) << "frozen biases " << frozen;
    });
}

TEST(MegatronParity, replicas_are_reduced_once_after_the_last_microbatch) {
  constexpr int64_t kUnits = 3, kMicrobatches = 3;
  for (const char* name : {"hsdp", "hfsdp"})
    for (const bool every_time : {false, true}) {
      if (every_time && std::string(name) == "hfsdp") continue;  // its last reduction cuts, so there is nothing to do early
      auto trace = std::make_shared<Trace>();
      on_mesh(
          grid(2, 2),
          [&](std::shared_ptr<MeshComm> comms) {
            auto model = parity::blocks(kUnits, 4);
            ShardOptions options = parity::block_units(name);
            options.broadcast_initial_values = false;
            options.reduce_replicas_every_microbatch = every_time;
            Sharded sharded = fully_shard(model.ptr(), comms, options);
            for (int64_t k = 0; k < kMicrobatches; ++k) {
              sharded.set_last_microbatch(k + 1 == kMicrobatches);
              call(model, toy::data({2, 4}, k)).sum().backward();
            }
          },
          {}, trace);
      auto calls = calls_of(*trace, 0);
      const int64_t inner = kUnits * kMicrobatches, outer = kUnits * (every_time ? kMicrobatches : 1);
      if (std::string(name) == "hsdp") {
        EXPECT_EQ(calls["reduce_scatter"], inner);
        EXPECT_EQ(calls["all_reduce"], outer);
      } else {
        EXPECT_EQ(calls["reduce_scatter"], inner + outer);
        EXPECT_EQ(calls["all_reduce"], 0);
      }
    }
}

TEST(MegatronParity, hfsdp_reducing_replicas_every_microbatch_trains_like_plain) {
  parity::Plan plan{.mesh = Mesh({{"dp_replicate", 2}, {"dp_shard", 2}}), .options = toy::options("hfsdp"), .microbatches = 3};
  plan.options.reduce_replicas_every_microbatch = true;
  plan.tolerance = 1e-6;
  expect_trains_like_plain([] { return parity::trainee(parity::blocks(2, 4), {2, 4}); }, plan);
}

TEST(MegatronParity, a_parent_without_parameters_of_its_own_trains) {
  parity::Plan plan{.mesh = ranks(2), .options = toy::options("zero3")};
  plan.on_start = [](Sharded& sharded) {
    EXPECT_EQ(sharded.describe().find("(root): 0 parameters"), 0u) << sharded.describe();
  };
  expect_trains_like_plain([] { return parity::trainee(parity::stack({4, 4, 2}), {3, 4}); }, plan);
}

TEST(MegatronParity, a_frozen_unit_has_no_gradient_memory) {
  for (const Strategy& row : strategies())
    on_mesh(grid(2, 2), [&](std::shared_ptr<MeshComm> comms) {
      auto model = parity::stack({8, 8, 8});
      for (at::Tensor& parameter : model->children()[0]->parameters()) parameter.requires_grad_(false);
      Sharded sharded = fully_shard(model.ptr(), comms, toy::options(row.name));
      Optimizer optimizer = sgd(sharded, {.lr = 0.1, .momentum = 0.5});
      call(model, toy::data({2, 8}, 1)).sum().backward();
      // One of two equal units is trained.
      const int64_t unit = (64 + 8 + 8) * 4, held = unit / (row.state.flat.empty() ? 1 : row.state.flat.size() == 2 ? 4 : 2);
      EXPECT_LE(sharded.memory().now(MemoryKind::gradient), held) << row.name;
      EXPECT_GT(sharded.memory().now(MemoryKind::gradient), 0);
      EXPECT_EQ(sharded.memory().now(MemoryKind::optimizer), sharded.memory().now(MemoryKind::gradient)) << row.name;
    });
}

TEST(MegatronParity, backwards_average_over_ranks_and_add_over_microbatches) {
  for (const Strategy& row : strategies())
    on_mesh(grid(2, 2), [&](std::shared_ptr<MeshComm> comms) {
      torch::nn::Linear model(torch::nn::LinearOptions(1, 4).bias(false));
      Sharded sharded = fully_shard(model.ptr(), comms, toy::options(row.name));
      for (const bool last : {false, true}) {
        sharded.set_last_microbatch(last);
        call(model, at::full({1, 1}, static_cast<double>(comms->rank() + 1))).sum().backward();
      }
      const parity::Tensors wanted{{"weight", at::full({4, 1}, 5.0)}};
      expect_near(parity::whole(sharded.gradients(), wanted, *comms).at("weight"), wanted.at("weight"), 0, row.name);
    });
}

TEST(MegatronParity, the_next_forward_computes_on_updated_parameters) {
  for (const bool keep : {false, true})
    for (const Strategy& row : strategies())
      on_mesh(grid(2, 2), [&](std::shared_ptr<MeshComm> comms) {
        torch::nn::Linear model(torch::nn::LinearOptions(1, 4).bias(false));
        {
          const at::NoGradGuard no_grad;
          model->weight.fill_(1);
        }
        ShardOptions options = toy::options(row.name);
        options.precision = {.main = at::kFloat, .compute = at::kBFloat16};
        options.reshard_after_forward = !keep;
        options.reshard_after_backward = !keep;
        Sharded sharded = fully_shard(model.ptr(), comms, options);
        Optimizer optimizer = sgd(sharded, {.lr = 0.25});
        for (int64_t step = 0; step < 3; ++step) {
          const at::Tensor loss = call(model, at::ones({1, 1})).sum();
          EXPECT_EQ(loss.item<float>(), 4 - step) << row.name << ": each weight falls by a quarter a step";
          loss.backward();
          optimizer.step();
        }
        {
          const at::NoGradGuard no_grad;
          for (const Piece& piece : sharded.main_parameters()) piece.data.fill_(8);
        }
        sharded.main_parameters_changed();
        EXPECT_EQ(call(model, at::ones({1, 1})).sum().item<float>(), 32) << row.name << ": as after loading";
      });
}

TEST(MegatronParity, parameters_are_published_once_a_step) {
  constexpr int64_t kUnits = 2;
  for (const char* name : {"zero1", "zero2", "hfsdp"}) {
    auto trace = std::make_shared<Trace>();
    on_mesh(
        grid(2, 2),
        [&](std::shared_ptr<MeshComm> comms) {
          auto model = parity::blocks(kUnits, 4);
          ShardOptions options = parity::block_units(name);
          Sharded sharded = fully_shard(model.ptr(), comms, options);
          Optimizer optimizer = sgd(sharded, {.lr = 0.1});
          for (int64_t step = 0; step < 3; ++step) {
            for (int64_t k = 0; k < 3; ++k) {
              const size_t before = trace->of_rank(comms->rank()).size();
              sharded.set_last_microbatch(k == 2);
              call(model, toy::data({2, 4}, k)).sum().backward();
              const int64_t gathers = calls_of(*trace, comms->rank(), before)["all_gather"];
              EXPECT_EQ(gathers, std::string(name) == "hfsdp" ? 2 * kUnits : 0)
                  << name << ": those of forward and backward alone";
            }
            const size_t before = trace->of_rank(comms->rank()).size();
            optimizer.step();
            EXPECT_EQ(calls_of(*trace, comms->rank(), before)["all_gather"], kUnits) << name;
          }
        },
        {}, trace);
  }
}

TEST(MegatronParity, low_precision_adam_follows_plain) {
  on_mesh(ranks(2), [](std::shared_ptr<MeshComm> comms) {
    auto model = parity::stack({8, 16, 4}), plain = parity::stack({8, 16, 4});
    ShardOptions options = toy::options("zero3");
    options.precision = {.main = at::kFloat, .compute = at::kBFloat16};
    Sharded sharded = fully_shard(model.ptr(), comms, options);
    Optimizer optimizer = adam(sharded, {.lr = 0.01});
    torch::optim::Adam plain_optimizer(plain->parameters(), torch::optim::AdamOptions(0.01));
    const at::Tensor x = toy::data({3, 8}, 1), target = toy::data({3, 4}, 2);
    for (int64_t step = 0; step < 5; ++step) {
      const at::Tensor loss = at::mse_loss(call(model, x).to(at::kFloat), target);
      plain->zero_grad();
      const at::Tensor wanted = at::mse_loss(plain->forward(x), target);
      // A few units in the last place of bfloat16, 2^-8.
      EXPECT_NEAR(loss.item<double>(), wanted.item<double>(), 4 * std::ldexp(1, -8) * wanted.item<double>()) << "step " << step;
      loss.backward();
      wanted.backward();
      optimizer.step();
      plain_optimizer.step();
    }
  });
}

TEST(MegatronParity, no_sync_ends_with_its_scope) {
  auto trace = std::make_shared<Trace>();
  on_mesh(
      ranks(2),
      [&](std::shared_ptr<MeshComm> comms) {
        auto model = parity::blocks(2, 4);
        ShardOptions options = toy::options("zero2");
        options.broadcast_initial_values = false;
        Sharded sharded = fully_shard(model.ptr(), comms, options);
        sharded.set_last_microbatch(false);
        try {
          const NoSync no_sync(sharded);
          call(model, toy::data({2, 4}, 1)).sum().backward();
          EXPECT_EQ(calls_of(*trace, comms->rank())["reduce_scatter"], 0);
          throw std::runtime_error("left by an exception");
        } catch (const std::runtime_error&) {
        }
        sharded.set_last_microbatch(true);
        call(model, toy::data({2, 4}, 1)).sum().backward();
        EXPECT_GT(calls_of(*trace, comms->rank())["reduce_scatter"], 0);
        EXPECT_GT(sharded.gradient_norm(), 0);
      },
      {}, trace);
}

namespace {

// Saves a view of the parameter, not the parameter.
struct TimesView : torch::autograd::Function<TimesView> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, at::Tensor x, at::Tensor view) {
    context->save_for_backward({x, view});
    return x * view;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0] * saved[1], gradients[0] * saved[0]};
  }
};

class ViewedImpl : public torch::nn::Module {
 public:
  ViewedImpl() { weight = register_parameter("weight", toy::data({8}, 3)); }
  at::Tensor forward(at::Tensor x) { return TimesView::apply(std::move(x), weight.view_as(weight)); }
  at::Tensor weight;
};
TORCH_MODULE(Viewed);

}  // namespace

TEST(MegatronParity, a_view_of_a_parameter_saved_for_backward_survives_resharding) {
  const MakeTrainee make = [] {
    auto model = std::make_shared<torch::nn::Module>("holder");
    Viewed viewed;
    model->register_module("viewed", viewed);
    return parity::Trainee{model, [viewed](int64_t salt) mutable {
                             const at::Tensor x = toy::data({8}, salt).requires_grad_(true);
                             return call(viewed, call(viewed, x)).square().sum();
                           }};
  };
  for (const char* name : {"ddp", "zero3"}) {
    parity::Plan plan{.mesh = ranks(2), .options = toy::options(name)};
    plan.options.units = by_type<ViewedImpl>();
    expect_trains_like_plain(make, plan);
  }
}
