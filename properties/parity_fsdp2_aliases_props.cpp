// Scenarios of docs/parity.md: one module, or one tensor, under several names.
#include <gtest/gtest.h>

#include <set>

#include "parity_models.h"
#include "parity_training.h"

using namespace shardproof;
using parity::expect_trains_like_plain;
using parity::MakeTrainee;

// Chosen by type, the module is found under both names.
TEST(Fsdp2Parity, a_module_registered_twice_is_one_unit) {
  const MakeTrainee make = [] {
    auto model = std::make_shared<torch::nn::Module>("twice");
    torch::nn::Linear shared(4, 4), own(4, 4);
    model->register_module("a", shared);
    model->register_module("b", shared);
    model->register_module("c", own);
    initialize_parameters(*model, 4, 0.5);
    const auto forward = [shared = shared.ptr(), own = own.ptr()](at::Tensor x) {
      for (int64_t i = 0; i < 2; ++i) x = at::tanh(call(shared, x));
      return call(own, x).square().sum();
    };
    return parity::Trainee{model, [model, forward](int64_t salt) { return call_as(*model, forward, toy::data({3, 4}, salt)); }};
  };
  for (const char* name : {"ddp", "zero3"}) {
    parity::Plan plan{.mesh = Mesh({{"dp_shard", 2}}), .options = toy::options(name)};
    plan.on_start = [](Sharded& sharded) {
      EXPECT_EQ(sharded.units().size(), 3u) << "the root, the shared module once, the other one";
      std::set<std::string> known;
      for (const auto& [key, value] : sharded.gather_parameters()) known.insert(key);
      EXPECT_TRUE(known.contains("a.weight") && known.contains("b.weight")) << "every name is known";
    };
    expect_trains_like_plain(make, plan);
  }
}
