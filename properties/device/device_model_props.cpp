// Whole models on a device that is as late as it may be, and that refuses tensors of the CPU beside its own: rank-threads that
// share it train random and chosen cases, and have the golden runs' bits.
#include <gtest/gtest.h>

#include <cstdlib>

#include "harness/case/generate.h"
#include "harness/case/network.h"
#include "properties/doubles/fake_device.h"
#include "properties/doubles/fake_ranks.h"
#include "properties/kit/expect_error.h"
#include "properties/kit/harness_env.h"
#include "properties/kit/held_cases.h"
#include "shardproof/shardproof.h"

using namespace harness;

namespace {

void must_hold(const std::string& text) {
  expect_held(text, fake_device::ranks());
}

const std::string kGpt = "gpt(layers=2,hidden=16,heads=2,vocab=29,positions=7";
const std::string kLlama = "llama(layers=2,hidden=16,heads=4,kv_heads=2,intermediate=24,vocab=29,positions=8";
const std::string kRun = " seed=7 : accumulate(2) step accumulate(1) step";

}  // namespace

TEST(DeviceModels, random_cases_have_the_golden_runs_bits_on_a_device) {
  const char* asked = std::getenv("SHARDPROOF_DEVICE_CASES");
  const int64_t cases = asked ? std::atoll(asked) : 50;
  int64_t held = 0;
  for (int64_t i = 0; i < cases; ++i) {
    const Case c = generate(77, i, {.world_max = 4});
    if (c.options.arithmetic != 0) continue;  // refused
    held += expect_held_or_diverged(c, fake_device::ranks());
  }
  EXPECT_GT(held, cases / 2);
}

TEST(DeviceModels, each_strategy_trains_a_gpt_with_dropout_and_tied_embeddings) {
  const std::string model = kGpt + ",tied,dropout=0.25) ";
  for (const char* strategy : {"ddp", "zero1", "zero2", "zero3"})
    must_hold(model + "mesh(dp_shard=3) " + strategy + " adamw(lr=0.01,decay=0.1,clip=0.5) ordered" + kRun);
  must_hold(model + "mesh(dp_replicate=2,dp_shard=2) hsdp(recompute=1,prefetch=2) adamw(lr=0.01,clip=1) ordered" + kRun);
  must_hold(model + "mesh(dp_shard=2) zero3(meta=1,recompute=2,pooled=1,loss=sum) lion(lr=0.01) canonical" + kRun);
}

TEST(DeviceModels, tensor_and_sequence_parallel_models_have_positions_and_masks_where_their_data_is) {
  must_hold(kGpt + ",dropout=0.25) mesh(dp_shard=1,tp=2) zero3(loss=sum,sp=1) sgd(lr=0.1) fast" + kRun);
  must_hold(kLlama + ",tied) mesh(dp_shard=2,tp=2) zero3(loss=sum) adamw(lr=0.01) fast" + kRun);
}

TEST(DeviceModels, context_parallel_models_have_positions_and_masks_where_their_data_is) {
  for (const char* attention : {"ring", "gathered"})
    for (const std::string& model : {kGpt + ",dropout=0.25) ", kLlama + ") "})
      must_hold(model + "mesh(dp_shard=2,cp=2) zero3(loss=sum,attention=" + attention + ") adamw(lr=0.01) fast" + kRun);
}

TEST(DeviceModels, a_model_made_without_memory_gets_it_with_its_buffers_on_the_device) {
  must_hold("odd(width=5,calls=2,tied) mesh(dp_shard=2) zero3(meta=1) sgd(lr=0.1) ordered" + kRun);
}

TEST(DeviceModels, a_norm_of_any_order_is_the_golden_runs) {
  for (const char* order : {"1", "2", "inf"}) {
    const std::string optimizer = std::string("adamw(lr=0.01,clip=0.01,norm=") + order + ") ordered";
    must_hold(kGpt + ") mesh(dp_shard=3) zero3 " + optimizer + kRun);
  }
}

TEST(DeviceModels, a_norm_that_overflows_names_the_parameter) {
  using namespace shardproof;
  fake_device::install();
  const auto body = [](std::shared_ptr<Comm> comm) {
    Mlp mlp(MlpOptions{.widths = {1, 1}, .bias = false});
    move_to(*mlp, fake_device::device());
    const auto comms = std::make_shared<MeshComm>(comm, Mesh::parse("dp_shard=2"));
    Sharded sharded = fully_shard(mlp.ptr(), comms, {.gradient_divide = 1});
    call(mlp, at::full({1, 1}, 3e38, fake_device::options(at::kFloat))).sum().backward();
    sharded.gradient_norm();
  };
  expect_error([&] { run_threads(2, body, {.device = fake_device::device()}); }, {"norm of the reduced gradient", "weight"});
}

TEST(DeviceModels, canonical_arithmetic_is_refused_and_says_where_it_computes) {
  fake_device::install();
  shardproof::Mlp model(shardproof::MlpOptions{.widths = {3, 2}});
  move_to(*model, fake_device::device());
  shardproof::use_canonical_arithmetic(*model);
  const auto shard = [&](std::shared_ptr<shardproof::Comm> comm) {
    fully_shard(model.ptr(), std::make_shared<shardproof::MeshComm>(comm, shardproof::Mesh({{"dp_shard", 1}})), {});
  };
  shardproof::expect_error([&] { shardproof::run_threads(1, shard); },
                           {"use_canonical_arithmetic computes on the CPU", "move the module"});
}

TEST(DeviceModels, low_precision_and_loss_scaling_have_the_golden_runs_bits_on_a_device) {
  const std::string mesh = ") mesh(dp_shard=3) ";
  must_hold(kGpt + mesh + "zero3(compute=bf16,reduce=bf16,float32_sums=1) adamw(lr=0.01,decay=0.1,clip=0.5) ordered" + kRun);
  must_hold(kLlama + mesh + "zero2(compute=bf16) lion(lr=0.01,clip=0.1) ordered" + kRun);
  must_hold(kGpt + mesh + "zero1(scale=1000000000,compute=fp16) adam(lr=0.01) ordered" + kRun);
}
