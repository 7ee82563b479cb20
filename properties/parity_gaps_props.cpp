// Scenarios of docs/parity.md that the library does not pass yet; not in the build until it does.
#include <gtest/gtest.h>

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
