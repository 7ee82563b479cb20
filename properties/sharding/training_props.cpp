// Scenarios of PyTorch's test_fully_shard_training.py: one forward, one backward, in every shape. See docs/parity.md.
#include <gtest/gtest.h>

#include "properties/kit/parity_models.h"
#include "properties/kit/parity_training.h"

using namespace shardproof;
using parity::expect_trains_like_plain;
using parity::MakeTrainee;
using parity::on_mesh;
using parity::ranks;

namespace {

const std::vector<Reshard> kReshards{Reshard::always(), Reshard::never(), Reshard::within(2)};


MakeTrainee make_stack(std::vector<int64_t> widths) {
  return [widths] { return parity::trainee(parity::stack(widths), {4, widths.front()}); };
}

ShardOptions root_only(const std::string& strategy) {
  ShardOptions options = toy::options(strategy);
  options.units = {};
  return options;
}

}  // namespace

TEST(Fsdp2Parity, a_module_without_inputs_trains_like_plain) {
  const MakeTrainee make = [] {
    parity::WeightOnly model;
    return parity::Trainee{model.ptr(),
                           [model](int64_t salt) mutable { return call(model).sum() * static_cast<double>(1 + salt % 3); }};
  };
  for (const char* name : {"ddp", "zero2", "zero3"})
    expect_trains_like_plain(make, {.mesh = ranks(3), .options = root_only(name)});
}

namespace {

// Only containers go in and out, between units, through a root without parameters.
class NestedImpl : public torch::nn::Module {
 public:
  using Pack = std::pair<std::vector<at::Tensor>, std::tuple<at::Tensor, int64_t, std::optional<at::Tensor>>>;
  class PartImpl : public torch::nn::Module {
   public:
    PartImpl() : linear(register_module("linear", torch::nn::Linear(5, 5))) {}
    Pack forward(Pack pack) {
      for (at::Tensor& tensor : pack.first) tensor = at::tanh(linear(tensor));
      auto& [x, count, maybe] = pack.second;
      x = at::tanh(linear(x)) * count;
      if (maybe) maybe = at::sin(linear(*maybe));
      return pack;
    }
    torch::nn::Linear linear;
  };
  NestedImpl() {
    for (int i = 0; i < 3; ++i) parts.push_back(register_module(std::to_string(i), std::make_shared<PartImpl>()));
    initialize_parameters(*this, 2, 0.5);
  }
  at::Tensor forward(std::vector<at::Tensor> xs) {
    Pack pack{{xs[0], xs[1]}, {xs[2], 2, xs[0] * 0.5}};
    for (auto& part : parts) pack = call(part, pack);
    return pack.first[0] + pack.first[1] + std::get<0>(pack.second) + *std::get<2>(pack.second);
  }
  std::vector<std::shared_ptr<PartImpl>> parts;
};
TORCH_MODULE(Nested);

}  // namespace

TEST(Fsdp2Parity, tensors_in_nested_containers_are_found) {
  const MakeTrainee make = [] {
    Nested model;
    return parity::Trainee{model.ptr(), [model](int64_t salt) mutable {
                             std::vector<at::Tensor> xs;
                             for (int64_t i = 0; i < 3; ++i) xs.push_back(toy::data({2, 5}, salt + 10 * i));
                             return call(model, xs).square().sum();
                           }};
  };
  for (const bool recompute : {false, true}) {
    ShardOptions options = toy::options("zero3");
    options.units = by_type<NestedImpl::PartImpl>();
    if (recompute) options.recompute = options.units;
    expect_trains_like_plain(make, {.mesh = ranks(2), .options = options});
  }
}

TEST(Fsdp2Parity, parameters_are_whole_while_the_reshard_setting_says) {
  for (const Reshard& reshard : kReshards)
    on_mesh(ranks(4), [&](std::shared_ptr<MeshComm> comms) {
      auto model = parity::stack({3, 3, 3, 3});
      Sharding sharding(comms, [&] {
        ShardOptions options = root_only("zero3");
        options.reshard_after_forward = reshard;
        return options;
      }());
      const auto first = model->ptr(0), second = model->ptr(2);
      Sharded sharded = sharding.unit(first).unit(second).shard(model.ptr());
      const auto expect_units = [&](bool inner, bool root, const char* when) {
        EXPECT_EQ(sharded.unit("0").is_unsharded(), inner) << when;
        EXPECT_EQ(sharded.unit("2").is_unsharded(), inner) << when;
        EXPECT_EQ(sharded.unit("").is_unsharded(), root) << when;
        EXPECT_EQ(parity::has_memory(model->parameters()[0]), inner || reshard.ranks() == 99) << when;
        EXPECT_EQ(parity::has_memory(model->parameters()[4]), root) << when;
      };
      expect_units(false, false, "after sharding");
      at::Tensor loss = call(model, toy::data({2, 3}, comms->rank())).square().sum();
      expect_units(reshard.keeps_everything(), true, "after forward; the root keeps its own");
      for (UnitHandle unit : sharded.units()) unit.reshard();
      expect_units(false, false, "after resharding by hand");
      loss.backward();
      expect_units(false, false, "after backward");
    });
}

TEST(Fsdp2Parity, a_model_of_float64_trains_in_float64) {
  const MakeTrainee make = [] {
    auto model = parity::stack({4, 12, 4});
    model->to(at::kDouble);
    return parity::Trainee{model.ptr(), [model](int64_t salt) mutable {
                             return call(model, toy::data({2, 4}, salt).to(at::kDouble)).square().sum();
                           }};
  };
  for (const char* name : {"ddp", "zero1", "zero3"})
    expect_trains_like_plain(make, {.mesh = ranks(2), .options = toy::options(name), .steps = 4});
}

TEST(Fsdp2Parity, one_unit_with_uneven_shards_trains_like_plain) {
  for (const auto& widths : std::vector<std::vector<int64_t>>{{16, 15, 8}, {7, 15, 3}, {16, 17, 8}})
    for (const int64_t world : {2, 3, 8})
      expect_trains_like_plain(make_stack(widths), {.mesh = ranks(world), .options = root_only("zero3")});
}

TEST(Fsdp2Parity, several_units_train_like_plain_whenever_collectives_complete) {
  using Options = ThreadsOptions;
  for (const Reshard& reshard : kReshards)
    for (const auto completion : {Options::Completion::late, Options::Completion::random})
      for (uint64_t seed = 0; seed < 4; ++seed) {
        ShardOptions options = toy::options("zero3");
        options.reshard_after_forward = reshard;
        options.prefetch_forward = static_cast<int64_t>(seed % 3);
        options.prefetch_backward = static_cast<int64_t>(seed / 2);
        expect_trains_like_plain(
            make_stack({5, 7, 7, 3}),
            {.mesh = ranks(4), .options = options, .threads = {Options::Schedule::serial, completion, {}, seed}});
      }
}

TEST(Fsdp2Parity, units_gathered_ahead_by_hand_train_like_plain) {
  for (const char* name : {"zero3", "hsdp"})
    for (const auto completion : {ThreadsOptions::Completion::eager, ThreadsOptions::Completion::late}) {
      parity::Plan plan{.mesh = Mesh({{"dp_replicate", 2}, {"dp_shard", 2}}), .options = toy::options(name)};
      plan.threads.completion = completion;
      plan.on_step = [](Sharded& sharded, torch::nn::Module&, int64_t) {
        for (UnitHandle unit : sharded.units()) unit.start_unshard();
      };
      expect_trains_like_plain(make_stack({5, 7, 7, 3}), plan);
    }
}

TEST(Fsdp2Parity, a_unit_runs_by_itself_after_the_root_and_before_it) {
  for (const bool unit_first : {true, false}) {
    const MakeTrainee make = [unit_first] {
      auto model = parity::blocks(3, 4);
      return parity::Trainee{model.ptr(), [model, unit_first](int64_t salt) mutable {
                               const bool alone = (salt / 1000 % 2 == 0) == unit_first;
                               const at::Tensor x = toy::data({8, 4}, salt);
                               auto block = std::dynamic_pointer_cast<parity::BlockImpl>(model->children()[0]);
                               return (alone ? call(block, x) : call(model, x)).square().sum();
                             }};
    };
    ShardOptions options = parity::block_units("zero3");
    expect_trains_like_plain(make, {.mesh = ranks(2), .options = options, .steps = 4});
  }
}

TEST(Fsdp2Parity, an_entry_point_besides_forward_is_a_forward_of_the_unit) {
  const MakeTrainee make = [] {
    parity::ChunkedHead model;
    return parity::Trainee{model.ptr(), [model](int64_t salt) mutable {
                             const at::Tensor hidden = call_as(
                                 model, [&](at::Tensor ids) { return model->hidden(std::move(ids)); }, parity::tokens(salt));
                             return call(model->head, hidden).square().sum();
                           }};
  };
  ShardOptions options = root_only("zero3");
  options.units = by_name("head");
  expect_trains_like_plain(make, {.mesh = ranks(2), .options = options});
}

TEST(Fsdp2Parity, after_an_exception_in_a_forward_training_goes_on) {
  for (const auto completion : {ThreadsOptions::Completion::eager, ThreadsOptions::Completion::late}) {
    parity::Plan plan{.mesh = ranks(2), .options = toy::options("zero3"), .steps = 3};
    plan.options.prefetch_forward = 1;
    plan.threads.completion = completion;
    const MakeTrainee make = [] { return parity::trainee(toy::Net(toy::NetImpl::Options{}), {4, 7}); };
    plan.on_step = [](Sharded& sharded, torch::nn::Module& module, int64_t step) {
      auto& net = dynamic_cast<toy::NetImpl&>(module);
      if (step == 1) {
        net.between = [] { throw std::runtime_error("boom"); };
        EXPECT_THROW(call(net, toy::data({4, 7}, 0)), std::runtime_error);
        net.between = [] {};
        sharded.zero_gradients();
      }
    };
    expect_trains_like_plain(make, plan);
  }
}

namespace {

// Two forwards, and a backward through both; of the units after the body either both modules run or one.
MakeTrainee make_two_forwards(bool partial) {
  return [partial] {
    parity::ChunkedHead model;
    return parity::Trainee{model.ptr(), [model, partial](int64_t salt) mutable {
                             at::Tensor a = call(model, parity::tokens(salt)), b = call(model, parity::tokens(salt + 1));
                             if (!partial) a = call(model->head, a), b = call(model->head, b);
                             return (a.sum() - b.square().sum()).square();
                           }};
  };
}

}  // namespace

TEST(Fsdp2Parity, two_forwards_before_one_backward_train_like_plain) {
  for (const bool partial : {false, true})
    for (const Reshard& reshard : {Reshard::always(), Reshard::never()}) {
      parity::Plan plan{.mesh = ranks(2), .options = root_only("zero3")};
      plan.options.reshard_after_forward = reshard;
      plan.shard = [&](const parity::Trainee& own, std::shared_ptr<MeshComm> comms) {
        auto& model = dynamic_cast<parity::ChunkedHeadImpl&>(*own.module);
        return Sharding(comms, plan.options)
            .unit(model.body.ptr())
            .unit({model.norm.ptr(), model.head.ptr()})
            .shard(own.module);
      };
      expect_trains_like_plain(make_two_forwards(partial), plan);
    }
}

TEST(Fsdp2Parity, two_forwards_of_recomputed_units_before_one_backward_train_like_plain) {
  const MakeTrainee make = [] {
    parity::ChunkedHead model;
    return parity::Trainee{model.ptr(), [model](int64_t salt) mutable {
                             const at::Tensor a = call(model->head, call(model, parity::tokens(salt)));
                             const at::Tensor b = call(model->head, call(model, parity::tokens(salt + 1)));
                             return (a.sum() - b.square().sum()).square();
                           }};
  };
  parity::Plan plan{.mesh = Mesh({{"dp_shard", 2}}), .options = toy::options("zero3")};
  plan.options.units = [](const std::string& name, const torch::nn::Module&) { return name == "body" || name == "head"; };
  plan.options.recompute = by_name("body");
  expect_trains_like_plain(make, plan);
}
