// Offload from a device that is as late as it may be: a copy that nobody waits for has not happened, and one that starts early
// copies what was there before.
#include <gtest/gtest.h>

#include "harness/case/generate.h"
#include "harness/case/network.h"
#include "properties/doubles/fake_device.h"
#include "properties/doubles/fake_ranks.h"
#include "properties/kit/harness_env.h"
#include "properties/kit/held_cases.h"
#include "properties/kit/toy_modules.h"

using namespace shardproof;

namespace {

constexpr int64_t kWidth = 16, kUnits = 5, kRanks = 2;
constexpr int64_t kState = kUnits * kWidth * kWidth / kRanks;  // elements of a rank

// Trains a chain of equal units on the device; calls `look` after the backward and after the step, of which it is told.
void train(at::ScalarType compute, const std::function<void(Sharded&, const Optimizer&, bool stepped)>& look,
           Offload offload = Offload::pinned) {
  fake_device::install();
  ThreadsOptions threads;
  threads.device = fake_device::device();
  run_threads(
      kRanks,
      [&](std::shared_ptr<Comm> comm) {
        Mlp model(MlpOptions{.widths = std::vector<int64_t>(kUnits + 1, kWidth), .bias = false});
        harness::move_to(*model, fake_device::device());
        ShardOptions options;
        options.units = by_type<torch::nn::LinearImpl>();
        options.precision = {.main = at::kFloat, .compute = compute};
        options.offload = offload;
        Sharded sharded = fully_shard(model.ptr(), std::make_shared<MeshComm>(comm, Mesh({{"dp_shard", kRanks}})), options);
        Optimizer optimizer = adamw(sharded, {});
        for (int step = 0; step < 2; ++step) {
          const at::Tensor input = toy::data({3, kWidth}, comm->rank()).to(fake_device::device());
          call(model, input).square().sum().backward();
          look(sharded, optimizer, false);
          optimizer.step();
          look(sharded, optimizer, true);
        }
      },
      threads);
}

}  // namespace

TEST(DeviceOffload, random_cases_have_the_golden_runs_bits_on_a_device) {
  for (int64_t i = 0; i < 40; ++i) {
    harness::Case c = harness::generate(20261123, i, {.world_max = 4});
    if (c.options.arithmetic != 0) continue;  // the CPU's
    c.options.set("offload", "pinned");
    harness::expect_held_or_diverged(c, fake_device::ranks());
  }
}

TEST(DeviceOffload, steps_in_low_precision_with_clipping_and_loss_scaling_have_the_golden_runs_bits) {
  const std::string model = "gpt(layers=2,hidden=16,heads=2,vocab=29,positions=7,tied) mesh(dp_shard=2) ";
  for (const char* rest : {"zero3(compute=bf16,reduce=bf16,offload=pinned) adamw(lr=0.01,decay=0.1,clip=0.5) ordered",
                           "zero2(compute=fp16,scale=1024,offload=pinned) adam(lr=0.01) ordered",
                           "ddp(loss=tokens,offload=pageable) lion(lr=0.01,clip=0.1) canonical",
                           "zero1(divide=split,offload=pinned) sgd(lr=0.1,momentum=0.9) ordered"})
    harness::expect_held(model + rest + " seed=7 : accumulate(2) step*3 save load@mesh(dp_shard=3) step", fake_device::ranks());
  harness::expect_held(
      "mlp(widths=5-6-3) mesh(dp_shard=2,tp=2) zero3(granularity=tensor,offload=pinned) muon(lr=0.1,clip=0.5) fast seed=3 : "
      "step*2",
      fake_device::ranks());
}

TEST(DeviceOffload, the_device_keeps_parameters_and_the_host_the_rest) {
  train(at::kBFloat16, [](Sharded& sharded, const Optimizer& optimizer, bool stepped) {
    for (const Piece& piece : sharded.parameters()) EXPECT_EQ(piece.data.device(), fake_device::device());
    std::vector<Piece> pieces = sharded.main_parameters();
    for (const std::string& state_name : optimizer.state_names())
      for (const Piece& piece : optimizer.state(state_name)) pieces.push_back(piece);
    for (const Piece& piece : sharded.gradients()) pieces.push_back(piece);
    EXPECT_EQ(std::ssize(pieces), (stepped ? 3 : 4) * kUnits);
    for (const Piece& piece : pieces) EXPECT_TRUE(piece.data.is_cpu()) << piece.name;
    EXPECT_EQ(sharded.memory().now_total(), kState * 2);
    EXPECT_EQ(sharded.memory().host.now_total(), kState * (4 + 2 + 8 + (stepped ? 0 : 4)));
  });
}

TEST(DeviceOffload, without_it_the_device_keeps_main_parameters_and_state_and_no_copy_in_the_compute_dtype) {
  train(
      at::kBFloat16,
      [](Sharded& sharded, const Optimizer&, bool stepped) {
        EXPECT_EQ(sharded.memory().now_total(), kState * (4 + 8 + (stepped ? 0 : 4)));
        EXPECT_EQ(sharded.memory().host.now_total(), 0);
        const std::vector<Piece> main = sharded.main_parameters(), rounded = sharded.parameters();
        ASSERT_EQ(main.size(), rounded.size());
        for (size_t i = 0; i < main.size(); ++i)
          EXPECT_TRUE(at::equal(main[i].data.to(at::kCPU).to(at::kBFloat16), rounded[i].data.to(at::kCPU))) << main[i].name;
      },
      Offload::none);
}

// They are waited for when somebody wants them; a third one waits for the first.
TEST(DeviceOffload, two_final_gradients_are_on_their_way_when_a_backward_ends) {
  train(at::kBFloat16, [](Sharded& sharded, const Optimizer&, bool stepped) {
    if (stepped) return;
    EXPECT_EQ(sharded.memory().now(MemoryKind::gradient), 2 * kState / kUnits * 4);
    sharded.gradient_norm();
    EXPECT_EQ(sharded.memory().now(MemoryKind::gradient), 0);
  });
}

TEST(DeviceOffload, who_says_that_main_parameters_will_change_may_write_to_pieces_from_before) {
  train(at::kFloat, [](Sharded& sharded, const Optimizer&, bool stepped) {
    if (!stepped) return;
    const std::vector<Piece> pieces = sharded.main_parameters();
    for (const double value : {7, 8}) {
      sharded.main_parameters_will_change();
      for (const Piece& piece : pieces) piece.data.fill_(value);
      if (value == 7) sharded.main_parameters_changed();
    }
    for (const Piece& piece : sharded.parameters()) EXPECT_EQ(piece.data.to(at::kCPU)[0].item<float>(), 7);
    sharded.main_parameters_changed();
  });
}

TEST(DeviceOffload, main_parameters_may_be_written_while_the_device_still_fetches_those_of_the_step) {
  train(at::kFloat, [](Sharded& sharded, const Optimizer&, bool stepped) {
    if (!stepped) return;
    for (const Piece& piece : sharded.main_parameters()) piece.data.fill_(7);
    for (const Piece& piece : sharded.parameters()) EXPECT_NE(piece.data.to(at::kCPU)[0].item<float>(), 7) << "not published";
    sharded.main_parameters_changed();
    for (const Piece& piece : sharded.parameters()) EXPECT_EQ(piece.data.to(at::kCPU)[0].item<float>(), 7);
  });
}
