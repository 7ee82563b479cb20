// Scenarios of docs/parity.md that the library does not pass yet; not in the build until it does.
#include <gtest/gtest.h>

#include <set>

#include "parity_models.h"
#include "parity_training.h"

using namespace shardproof;
using parity::expect_trains_like_plain;
using parity::MakeTrainee;

// The first of two pending recomputations completes a bucket; the next bucket's completion then starts both reductions, and the
// second recomputation's gradient comes too late.
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

// Chosen by type, the module is found under both names: "module torch::nn::LinearImpl has hooks already".
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

// "gradients pass from there by sums over one mesh axis after the other ... Name the splits of a layout innermost mesh axis
// first".
TEST(MegatronParity, hfsdp_reducing_replicas_every_microbatch_trains_like_plain) {
  parity::Plan plan{.mesh = Mesh({{"dp_replicate", 2}, {"dp_shard", 2}}), .options = toy::options("hfsdp"), .microbatches = 3};
  plan.options.reduce_replicas_every_microbatch = true;
  plan.tolerance = 1e-6;
  expect_trains_like_plain([] { return parity::trainee(parity::blocks(2, 4), {2, 4}); }, plan);
}

// A bucket of whole parameters is three chunks of 16 k elements; rounded up to a multiple of 9, its thirds are cut elsewhere.
TEST(MegatronParity, whole_parameters_stay_whole_on_any_number_of_ranks) {
  for (const int64_t world : {3, 5, 6, 7})
    parity::on_mesh(Mesh({{"dp_shard", world}}), [&](std::shared_ptr<MeshComm> comms) {
      auto model = parity::blocks(2, 5);
      ShardOptions options = toy::options("zero3");
      options.units = by_type<parity::BlockImpl>();
      options.granularity = Granularity::tensor;
      Sharded sharded = fully_shard(model.ptr(), comms, options);
      for (const Piece& piece : sharded.parameters())
        EXPECT_EQ(piece.run.size(), numel(piece.shape)) << world << " " << piece.name;
    });
}
