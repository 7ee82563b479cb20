// The optimizer's memory in the host's: no bit changes, and the device holds what shard_options.h says.
#include <gtest/gtest.h>

#include "harness/case/generate.h"
#include "properties/kit/harness_env.h"
#include "properties/kit/held_cases.h"
#include "properties/kit/toy_modules.h"

using namespace shardproof;

namespace {

// A chain of equal units, and nothing in the root.
constexpr int64_t kWidth = 16, kUnits = 5, kElements = kWidth * kWidth;

struct Plan {
  std::string strategy;
  int64_t replicas = 1, shards = 2;
  at::ScalarType compute = at::kFloat;
  Mesh mesh() const { return Mesh({{"dp_replicate", replicas}, {"dp_shard", shards}}); }
  std::string str() const { return strategy + " on " + mesh().str() + " in " + c10::toString(compute); }

  // Of one unit, on one rank.
  bool shards_parameters() const { return strategy == "zero3" || strategy == "hsdp" || strategy == "hfsdp"; }
  int64_t parameter_elements() const { return shards_parameters() ? kElements / shards : kElements; }
  int64_t state_elements() const {
    return strategy == "ddp" ? kElements : kElements / shards / (strategy == "hfsdp" ? replicas : 1);
  }
};

std::vector<Plan> plans() {
  std::vector<Plan> all;
  for (const char* strategy : {"ddp", "zero1", "zero2", "zero3", "hsdp", "hfsdp"})
    for (const auto& [replicas, shards] : {std::pair<int64_t, int64_t>{1, 2}, {2, 2}})
      for (const at::ScalarType compute : {at::kFloat, at::kBFloat16}) all.push_back({strategy, replicas, shards, compute});
  return all;
}

ShardOptions options_of(const Plan& plan, Offload offload) {
  ShardOptions options;
  options.strategy = strategy(plan.strategy);
  options.units = by_type<torch::nn::LinearImpl>();
  options.precision = {.main = at::kFloat, .compute = plan.compute};
  options.offload = offload;
  return options;
}

// Trains on every rank; calls `look` after the backward and after the step, of which it is told.
void train(const Plan& plan, Offload offload, const std::function<void(Sharded&, bool stepped)>& look) {
  run_threads(plan.replicas * plan.shards, [&](std::shared_ptr<Comm> comm) {
    Mlp model(MlpOptions{.widths = std::vector<int64_t>(kUnits + 1, kWidth), .bias = false});
    Sharded sharded = fully_shard(model.ptr(), std::make_shared<MeshComm>(comm, plan.mesh()), options_of(plan, offload));
    Optimizer optimizer = adamw(sharded, {});
    for (int step = 0; step < 2; ++step) {
      call(model, toy::data({3, kWidth}, comm->rank())).square().sum().backward();
      look(sharded, false);
      optimizer.step();
      look(sharded, true);
      sharded.reset_peak_memory();
    }
  });
}

}  // namespace

TEST(Offload, random_cases_have_the_bits_of_their_golden_runs) {
  for (int64_t i = 0; i < 60; ++i) {
    harness::Case c = harness::generate(20261122, i, {});
    c.options.set("offload", i % 4 == 0 ? "pageable" : "pinned");
    harness::expect_held_or_diverged(c);
  }
}

// What random cases draw seldom.
TEST(Offload, every_strategy_precision_and_optimizer_has_the_bits_of_its_golden_run) {
  for (const char* strategy : {"ddp", "zero1", "zero2", "zero3", "hsdp", "hfsdp"})
    for (const char* precision : {"compute=fp32", "compute=bf16,reduce=bf16", "compute=fp16,scale=1024"})
      for (const char* optimizer : {"adamw(lr=0.01,clip=0.5)", "sgd(lr=0.1,momentum=0.9)", "lion(lr=0.01,groups=2)"})
        harness::expect_held(
            fmt::format("gpt(layers=1,hidden=8,heads=2,vocab=11,positions=5,tied) mesh(dp_replicate=2,dp_shard=2) "
                        "{}({},offload=pinned) {} ordered seed=3 : accumulate(2) step freeze(4) step freeze(0) step",
                        strategy, precision, optimizer));
  for (const char* text :
       {"mlp(widths=5-6-3) mesh(dp_shard=2) zero3(granularity=tensor,offload=pinned) muon(lr=0.1) ordered seed=3 : step*2",
        "mlp(widths=5-6-3) mesh(dp_shard=2,tp=2) zero3(granularity=tensor,offload=pinned) muon(lr=0.1,clip=0.5) fast seed=3 : "
        "step*2",
        "mlp(widths=5-6-3) mesh(dp_shard=2) zero3(gather=side_by_side,meta=1,offload=pinned) adamw(lr=0.1) ordered seed=3 : "
        "step*3",
        "gpt(layers=1,hidden=8,heads=2,vocab=12,positions=8) mesh(dp_shard=2,cp=2,tp=2) "
        "zero2(loss=tokens,arithmetic=canonical,sp=1,offload=pinned) adamw(lr=0.01,clip=0.5) canonical seed=3 : "
        "accumulate(2) step save load@mesh(dp_shard=3) load@strategy(zero3) step*2"})
    harness::expect_held(text);
}

TEST(Offload, between_steps_the_device_holds_parameters_in_the_compute_dtype_and_nothing_else) {
  for (const Plan& plan : plans())
    train(plan, Offload::pinned, [&](Sharded& sharded, bool stepped) {
      const MemoryUse use = sharded.memory();
      const auto low = static_cast<int64_t>(c10::elementSize(plan.compute));
      const int64_t parameters = kUnits * plan.parameter_elements() * low, state = kUnits * plan.state_elements();
      EXPECT_EQ(use.now_total(), parameters) << plan.str();
      EXPECT_EQ(use.peak(MemoryKind::parameter), parameters) << plan.str();
      EXPECT_EQ(use.peak(MemoryKind::optimizer), 0) << plan.str();
      EXPECT_EQ(use.host.now(MemoryKind::parameter), state * 4 + (plan.compute == at::kFloat ? 0 : state * low)) << plan.str();
      EXPECT_EQ(use.host.now(MemoryKind::optimizer), 2 * state * 4) << plan.str();
      EXPECT_EQ(use.host.now(MemoryKind::gradient), stepped ? 0 : state * 4) << plan.str();
      EXPECT_EQ(use.host.peak(MemoryKind::gradient), state * 4) << plan.str();
      EXPECT_EQ(use.host.peak(MemoryKind::gathered) + use.host.peak(MemoryKind::communication), 0) << plan.str();
    });
}

// Without it they pile up until the step.
TEST(Offload, in_a_backward_final_gradients_leave_the_device_one_by_one) {
  for (const Plan& plan : plans()) {
    std::map<Offload, int64_t> peak;
    for (const Offload offload : {Offload::none, Offload::pinned})
      train(plan, offload, [&](Sharded& sharded, bool stepped) {
        if (sharded.rank() == 0 && !stepped) peak[offload] = sharded.memory().peak(MemoryKind::gradient);
      });
    const int64_t final_one = plan.state_elements() * 4;
    const int64_t summed_over_replicas = plan.replicas > 1 ? 1 : 0;  // beside two whole ones and the one that is made
    EXPECT_EQ(peak[Offload::none] - peak[Offload::pinned], (kUnits - 3 - summed_over_replicas) * final_one) << plan.str();
  }
}

// Norms and biases along tp hold terms, which are added on the device.
TEST(Offload, gradients_of_which_tensor_parallel_ranks_have_terms_leave_once_they_are_added) {
  run_threads(2, [](std::shared_ptr<Comm> comm) {
    const GptOptions model_options{.layers = 1, .hidden = 8, .heads = 2, .vocab = 12, .positions = 4};
    Gpt model(model_options);
    auto comms = std::make_shared<MeshComm>(comm, Mesh({{"dp_shard", 1}, {"tp", 2}}));
    const TensorParallel parallel = parallelize(model.ptr(), comms, gpt_plan(model_options, /*sequence_parallel=*/true));
    Sharded sharded = fully_shard(model.ptr(), comms, {.units = by_type<GptBlockImpl>(), .offload = Offload::pinned});
    int64_t terms = 0, on_host = 0;
    sharded.add_finishing_step("before the sums", 50, [&](Sharded& s) { terms = s.memory().now(MemoryKind::gradient); });
    call(model, at::arange(4, at::kLong).view({1, 4})).square().sum().backward();
    EXPECT_GT(terms, 0);
    EXPECT_EQ(sharded.memory().now(MemoryKind::gradient), 0);
    for (const Piece& piece : sharded.gradients()) on_host += static_cast<int64_t>(piece.data.nbytes());
    EXPECT_GE(sharded.memory().host.now(MemoryKind::gradient), on_host);
  });
}

TEST(Offload, without_it_nothing_is_in_the_hosts_memory) {
  train({.strategy = "zero3"}, Offload::none, [&](Sharded& sharded, bool) {
    EXPECT_EQ(sharded.memory().host.peak_total_bytes, 0);
    EXPECT_EQ(sharded.memory().host.now_total(), 0);
  });
}

TEST(Offload, main_parameters_written_by_hand_reach_every_rank) {
  for (const Plan& plan : plans())
    train(plan, Offload::pageable, [&](Sharded& sharded, bool stepped) {
      if (!stepped) return;
      for (const Piece& piece : sharded.main_parameters()) piece.data.fill_(static_cast<double>(sharded.step()) + 0.1);
      for (const Piece& piece : sharded.parameters())
        EXPECT_NE(piece.data[0].item<float>(), static_cast<float>(sharded.step()) + 0.1f) << "nobody has said so yet";
      sharded.main_parameters_changed();
      const at::Tensor expected = at::full({1}, static_cast<double>(sharded.step()) + 0.1).to(plan.compute);
      for (const auto& [name, value] : sharded.gather_parameters())
        EXPECT_TRUE(value.eq(expected).all().item<bool>()) << plan.str() << " " << name;
    });
}
