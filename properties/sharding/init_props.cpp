// Scenarios of PyTorch's test_fully_shard_init.py, _state.py, _ignore_params.py: which parameters a unit owns, what they may
// be, and where their first values come from. See docs/parity.md.
#include <gtest/gtest.h>

#include <set>

#include "properties/kit/expect_error.h"
#include "properties/kit/parity_models.h"
#include "properties/kit/parity_training.h"

using namespace shardproof;
using parity::expect_near;
using parity::expect_trains_like_plain;
using parity::MakeTrainee;
using parity::on_mesh;
using parity::ranks;

namespace {

const Mesh kTwoByTwo({{"dp_replicate", 2}, {"dp_shard", 2}});

std::vector<std::string> names_of(Sharded& sharded) {
  std::vector<std::string> names;
  for (const UnitHandle& unit : sharded.units()) names.push_back(unit.name());
  return names;
}

// Names of the parameters whose memory comes and goes with a unit.
std::set<std::string> owned_by(Sharded& sharded, const torch::nn::Module& module, const std::string& unit) {
  std::set<std::string> names;
  sharded.unit(unit).unshard();
  for (const auto& item : module.named_parameters())
    if (parity::has_memory(item.value())) names.insert(item.key());
  sharded.unit(unit).reshard();
  return names;
}

}  // namespace

TEST(Fsdp2Parity, units_own_what_no_inner_unit_does) {
  on_mesh(ranks(2), [](std::shared_ptr<MeshComm> comms) {
    auto model = parity::blocks(5, 4);
    const auto blocks = model->children();
    Sharding sharding(comms, [] {
      ShardOptions options = toy::options("zero3");
      options.units = {};
      return options;
    }());
    sharding.unit(blocks[0]->children()[0]).unit(blocks[0]).unit({blocks[1], blocks[3]});
    Sharded sharded = sharding.shard(model.ptr());
    EXPECT_EQ(names_of(sharded), (std::vector<std::string>{"", "0", "0.inner", "1"}));
    using Names = std::set<std::string>;
    EXPECT_EQ(owned_by(sharded, *model, "0.inner"), (Names{"0.inner.weight", "0.inner.bias"}));
    EXPECT_EQ(owned_by(sharded, *model, "0"), (Names{"0.outer.weight", "0.outer.bias"}));
    EXPECT_EQ(owned_by(sharded, *model, "1").size(), 8u) << "two blocks";
    EXPECT_EQ(owned_by(sharded, *model, "").size(), 8u) << "the other two";
    EXPECT_THROW(sharded.unit("4"), Error);
  });
}

TEST(Fsdp2Parity, a_module_registered_twice_trains_like_plain) {
  for (const char* name : {"ddp", "zero3"}) {
    parity::Plan plan{.mesh = ranks(2), .options = toy::options(name)};
    plan.options.units = by_name("c");
    plan.on_start = [](Sharded& sharded) {
      std::set<std::string> known;
      for (const auto& [key, value] : sharded.gather_parameters()) known.insert(key);
      EXPECT_TRUE(known.contains("a.weight") && known.contains("b.weight")) << "every name is known";
    };
    expect_trains_like_plain(parity::registered_twice, plan);
  }
}

TEST(Fsdp2Parity, a_model_built_without_memory_trains_like_one_built_with_it) {
  for (const int64_t width : {8, 3, 1})
    for (const bool low : {false, true})
      for (const char* name : {"ddp", "zero3", "hfsdp"})
        on_mesh(kTwoByTwo, [&](std::shared_ptr<MeshComm> comms) {
          const auto build = [&] { return parity::stack({width, width, width}); };
          ShardOptions options = toy::options(name);
          options.initialize = normal_initializer(11, 0.5);
          options.broadcast_initial_values = false;
          if (low) options.precision = {.main = at::kFloat, .compute = at::kBFloat16};
          std::shared_ptr<torch::nn::SequentialImpl> empty;
          {
            MetaInit meta;
            empty = torch::nn::Sequential(torch::nn::Linear(width, width), torch::nn::Tanh(), torch::nn::Linear(width, width))
                        .ptr();
          }
          for (const at::Tensor& parameter : empty->parameters()) EXPECT_TRUE(parameter.is_meta());
          auto full = build();
          initialize_parameters(*full, 11, 0.5);
          Sharded from_nothing = fully_shard(empty, comms, options);
          Sharded from_values = fully_shard(full.ptr(), comms, options);
          Optimizer first = adamw(from_nothing, {}), second = adamw(from_values, {});
          for (int64_t step = 0; step < 2; ++step) {
            const auto a = from_nothing.gather_parameters(), b = from_values.gather_parameters();
            ASSERT_EQ(a.size(), b.size());
            for (size_t i = 0; i < a.size(); ++i) expect_near(a[i].second, b[i].second, 0, a[i].first);
            call(empty, toy::data({2, width}, comms->rank())).to(at::kFloat).square().sum().backward();
            call(full, toy::data({2, width}, comms->rank())).to(at::kFloat).square().sum().backward();
            first.step();
            second.step();
          }
        });
}

TEST(Fsdp2Parity, a_model_without_memory_and_without_initial_values_is_refused_by_name) {
  const std::string message = refusal([] {
    on_mesh(ranks(2), [](std::shared_ptr<MeshComm> comms) {
      std::shared_ptr<torch::nn::SequentialImpl> empty;
      {
        MetaInit meta;
        empty = torch::nn::Sequential(torch::nn::Linear(3, 3)).ptr();
      }
      fully_shard(empty, comms, toy::options("zero3"));
    });
  });
  EXPECT_NE(message.find("0.weight"), std::string::npos) << message;
  EXPECT_NE(message.find("initialize"), std::string::npos) << "what to do: " << message;
}

TEST(Fsdp2Parity, one_axis_of_a_larger_mesh_trains_like_a_mesh_of_that_axis) {
  const Mesh mesh({{"other", 2}, {"dp_shard", 2}});
  for (const char* name : {"ddp", "zero1", "zero2", "zero3"})
    on_mesh(mesh, [&](std::shared_ptr<MeshComm> comms) {
      // The same world, cut into groups by hand instead.
      const int64_t other = mesh.coordinate(comms->rank(), "other"), shard = mesh.coordinate(comms->rank(), "dp_shard");
      const std::shared_ptr<Comm> by_hand = comms->world().split(other, shard, "by_hand");
      auto group = std::make_shared<MeshComm>(by_hand, ranks(2));
      auto a = parity::stack({4, 5, 3}), b = parity::stack({4, 5, 3});
      Sharded of_mesh = fully_shard(a.ptr(), comms, toy::options(name));
      Sharded of_group = fully_shard(b.ptr(), group, toy::options(name));
      const at::Tensor x = toy::data({2, 4}, 10 * other + shard);
      call(a, x).square().sum().backward();
      call(b, x).square().sum().backward();
      const auto first = of_mesh.gradients(), second = of_group.gradients();
      ASSERT_EQ(first.size(), second.size());
      for (size_t i = 0; i < first.size(); ++i) {
        EXPECT_EQ(first[i].run, second[i].run);
        expect_near(first[i].data, second[i].data, 0, first[i].name);
      }
      EXPECT_EQ(of_mesh.gradient_norm(), of_group.gradient_norm()) << name;
    });
}

TEST(Fsdp2Parity, replicas_start_from_the_parameters_and_buffers_of_rank_0) {
  for (const char* name : {"ddp", "hsdp", "hfsdp"})
    on_mesh(kTwoByTwo, [&](std::shared_ptr<MeshComm> comms) {
      auto model = parity::stack({4, 5, 3});
      const auto wanted = parity::stack({4, 5, 3});
      at::Tensor buffer = model->children()[0]->register_buffer("seen", at::full({3}, 1337 + comms->rank()));
      if (comms->rank() != 0) initialize_parameters(*model, 100 + comms->rank());
      Sharded sharded = fully_shard(model.ptr(), comms, toy::options(name));
      for (const auto& [key, value] : sharded.gather_parameters()) expect_near(value, wanted->named_parameters()[key], 0, key);
      expect_near(buffer, at::full({3}, 1337), 0, "the buffer");
      call(model, toy::data({2, 4}, 1)).sum().backward();
    });
}

TEST(Fsdp2Parity, a_finishing_step_may_reduce_over_an_axis_of_its_own) {
  const Mesh mesh({{"other", 2}, {"dp_shard", 2}});
  on_mesh(mesh, [&](std::shared_ptr<MeshComm> comms) {
    auto model = parity::stack({4, 5, 3}), plain = parity::stack({4, 5, 3});
    Sharded sharded = fully_shard(model.ptr(), comms, toy::options("zero3"));
    Comm& other = comms->along({"other"});
    sharded.add_finishing_step("average over other", 10, [&](Sharded& finished) {
      for (const Piece& piece : finished.gradients()) {
        other.all_reduce(piece.data).wait();
        piece.data.div_(2);
      }
    });
    call(model, toy::data({2, 4}, comms->rank())).square().sum().backward();
    parity::Tensors wanted;
    for (int64_t rank = 0; rank < 4; ++rank)
      for (const auto& [key, gradient] : parity::plain_gradients(parity::trainee(plain, {2, 4}), rank))
        wanted[key] = wanted[key].defined() ? wanted[key] + gradient / 4.0 : gradient / 4.0;
    for (const auto& [key, gradient] : parity::whole(sharded.gradients(), wanted, *comms))
      expect_near(gradient, wanted.at(key), 1e-6, key);
  });
}

TEST(Fsdp2Parity, ignored_parameters_stay_plain_tensors) {
  for (const char* name : {"ddp", "zero3"})
    on_mesh(ranks(2), [&](std::shared_ptr<MeshComm> comms) {
      auto model = parity::blocks(2, 4), plain = parity::blocks(2, 4);
      // A parameter of integers can only be ignored.
      model->register_parameter("ids", at::arange(5), /*requires_grad=*/false);
      ShardOptions options = toy::options(name);
      options.ignored = [](const std::string& key, const at::Tensor&) { return key.starts_with("0.inner") || key == "ids"; };
      Sharded sharded = fully_shard(model.ptr(), comms, options);
      Optimizer optimizer = sgd(sharded, {.lr = 0.1});
      const at::Tensor weight = model->named_parameters()["0.inner.weight"];
      EXPECT_TRUE(parity::has_memory(weight));
      for (const Piece& piece : sharded.parameters()) EXPECT_FALSE(piece.name.starts_with("0.inner")) << piece.name;
      call(model, toy::data({3, 4}, comms->rank())).square().sum().backward();
      // The caller's own: its gradient is this rank's, and the optimizer leaves it alone.
      const at::Tensor before = weight.detach().clone();
      expect_near(weight.grad(), parity::plain_gradients(parity::trainee(plain, {3, 4}), comms->rank()).at("0.inner.weight"), 0,
                  "own");
      optimizer.step();
      expect_near(weight, before, 0, "ignored");
      EXPECT_TRUE(weight.grad().defined());
    });
  const MakeTrainee make = [] {
    auto model = parity::trainee(parity::blocks(2, 4), {3, 4});
    for (auto& item : model.module->named_parameters())
      if (item.key().starts_with("0.inner")) item.value().requires_grad_(false);
    return model;
  };
  parity::Plan plan{.mesh = ranks(2), .options = toy::options("zero3")};
  plan.options.ignored = [](const std::string& key, const at::Tensor&) { return key.starts_with("0.inner"); };
  expect_trains_like_plain(make, plan);
}

TEST(Fsdp2Parity, copying_a_sharded_module_is_an_error) {
  on_mesh(ranks(2), [](std::shared_ptr<MeshComm> comms) {
    torch::nn::Linear model(4, 3);
    ShardOptions options = toy::options("zero3");
    options.units = {};
    Sharded sharded = fully_shard(model.ptr(), comms, options);
    const std::function<void()> copies[] = {[&] { model->clone(); }, [&] { model->to(at::kDouble); }};
    for (const auto& copy : copies) {
      try {
        copy();
        ADD_FAILURE() << "it copied what is not there";
      } catch (const c10::Error& error) {
        EXPECT_NE(std::string(error.what()).find("weight is sharded"), std::string::npos) << error.what();
      }
    }
    call(model, toy::data({2, 4}, 1)).sum().backward();
    EXPECT_GT(sharded.gradient_norm(), 0) << "the module is as it was";
  });
}
