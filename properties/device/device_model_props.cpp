// Whole models on a device that is as late as it may be, and that refuses tensors of the CPU beside its own: rank-threads that
// share it train random and chosen cases, and have the golden runs' bits.
#include <gtest/gtest.h>

#include <torch/csrc/autograd/autograd.h>

#include <cstdlib>
#include <functional>
#include <map>

#include "harness/case/generate.h"
#include "harness/case/network.h"
#include "properties/doubles/fake_device.h"
#include "properties/doubles/fake_ranks.h"
#include "properties/kit/expect_error.h"
#include "properties/kit/harness_env.h"
#include "properties/kit/held_cases.h"
#include "shardproof/nn/dropout_mask.h"
#include "shardproof/sharding/hand_over.h"
#include "shardproof/shardproof.h"

using namespace harness;

namespace {

void must_hold(const std::string& text) {
  expect_held(text, fake_device::ranks());
}

const std::string kGpt = "gpt(layers=2,hidden=16,heads=2,vocab=29,positions=7";
const std::string kLlama = "llama(layers=2,hidden=16,heads=4,kv_heads=2,intermediate=24,vocab=29,positions=8";
const std::string kRun = " seed=7 : accumulate(2) step accumulate(1) step";

using Waits = std::map<std::string, int64_t>;

Waits difference(Waits after, const Waits& before) {
  for (const auto& [what, times] : before) after[what] -= times;
  std::erase_if(after, [](const auto& each) { return each.second == 0; });
  return after;
}

// What ranks do in each step on two units.
struct Loop {
  shardproof::ShardOptions options = {};
  std::string mesh = "dp_shard=2";
  int64_t microbatches = 1;
  std::function<void(shardproof::Sharded&)> before_update = {};

  int64_t ranks() const { return shardproof::Mesh::parse(mesh).size(); }
};

// What their hosts wait for while they shard the units and train so many steps.
Waits waits_of(int64_t steps, Loop loop) {
  using namespace shardproof;
  fake_device::install();
  const Waits before = fake_device::host_waits();
  loop.options.units = by_type<torch::nn::LinearImpl>();
  run_threads(
      loop.ranks(),
      [&](std::shared_ptr<Comm> comm) {
        Mlp model(MlpOptions{.widths = {8, 8, 8}});
        harness::move_to(*model, fake_device::device());
        Sharded sharded = fully_shard(model.ptr(), std::make_shared<MeshComm>(comm, Mesh::parse(loop.mesh)), loop.options);
        Optimizer optimizer = adamw(sharded, {.lr = 0.1});
        const at::Tensor input = at::ones({3, 8}).to(fake_device::device());
        for (int64_t step = 0; step < steps; ++step) {
          for (int64_t round = 1; round <= loop.microbatches; ++round) {
            sharded.set_last_microbatch(round == loop.microbatches);
            call(model, input).square().sum().backward();
          }
          if (loop.before_update) loop.before_update(sharded);
          optimizer.step();
        }
      },
      {.device = fake_device::device()});
  return difference(fake_device::host_waits(), before);
}

Waits waits_of_two_steps(const Loop& loop) {
  return difference(waits_of(3, loop), waits_of(1, loop));
}

}  // namespace

TEST(DeviceModels, random_cases_have_the_golden_runs_bits_on_a_device) {
  const char* asked = std::getenv("SHARDPROOF_DEVICE_CASES");
  const int64_t cases = asked ? std::atoll(asked) : 50;
  int64_t held = 0;
  for (int64_t i = 0; i < cases; ++i) {
    const Case c = generate(77, i, {.world_max = 4});
    held += expect_held_or_diverged(c, fake_device::ranks());
  }
  EXPECT_GT(held, cases / 2);
}

TEST(DeviceModels, each_strategy_trains_a_gpt_with_dropout_and_tied_embeddings) {
  const std::string model = kGpt + ",tied,dropout=0.25) ";
  for (const char* strategy : {"ddp", "zero1", "zero2", "zero3"})
    must_hold(model + "mesh(dp_shard=3) " + strategy + " adamw(lr=0.01,decay=0.1,clip=0.5) ordered" + kRun);
  must_hold(
      model +
      "mesh(dp_replicate=2,dp_shard=2) hsdp(recompute=1,prefetch_forward=2,prefetch_backward=2) adamw(lr=0.01,clip=1) ordered" +
      kRun);
  must_hold(model + "mesh(dp_shard=2) zero3(meta=1,recompute=2,buffers=pooled,loss=sum) lion(lr=0.01) canonical" + kRun);
}

// The host sends one number for each row and each column of the mask, and none for an element.
TEST(DeviceModels, masks_of_dropout_are_made_on_the_device_with_the_bits_of_the_host) {
  using namespace shardproof;
  fake_device::install();
  const std::vector<DimRows> dims = {{{2, 3}, 5}, {{0, 4, 1}, 9}, {{8, 9, 30, 31, 32, 7, 6}, 40}};
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    const DropoutSite site{.key = 77, .probability = 0.3};
    const int64_t before = fake_device::bytes_from_host();
    const at::Tensor there = dropout_mask(site, dims, dtype, fake_device::device());
    EXPECT_EQ(fake_device::bytes_from_host() - before, (2 * 3 + 7) * 8);
    EXPECT_EQ(there.device(), fake_device::device());
    EXPECT_TRUE(there.to(at::kCPU).equal(dropout_mask(site, dims, dtype))) << dtype;
  }
  const at::Tensor x = at::ones({2, 3, 64}), there = x.to(fake_device::device());
  const int64_t before = fake_device::bytes_from_host();
  random_stream() = {.seed = 5};
  const at::Tensor dropped = shardproof::dropout(there, 0.5, /*training=*/true);
  EXPECT_LT(fake_device::bytes_from_host() - before, there.numel() * 4);
  random_stream() = {.seed = 5};
  EXPECT_TRUE(dropped.to(at::kCPU).equal(shardproof::dropout(x, 0.5, /*training=*/true)));
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

TEST(DeviceModels, canonical_arithmetic_has_the_golden_runs_bits_on_a_device) {
  const std::string rest = "arithmetic=canonical,loss=sum) adamw(lr=0.01,clip=0.1) canonical" + kRun;
  for (const char* activation : {"relu", "identity", "tanh", "gelu"}) {
    const std::string model = std::string("mlp(widths=5-9-3,act=") + activation + ") ";
    must_hold(model + "mesh(dp_shard=3) zero3(" + rest);
    must_hold(model + "mesh(dp_shard=2,tp=2) zero3(" + rest);
    must_hold(model + "mesh(dp_replicate=2,tp=3) ddp(" + rest);
  }
  must_hold("mlp(widths=5-4-3,act=tanh) mesh(dp_shard=1,tp=3) zero3(" + rest);  // the last rank has no hidden column
  for (const std::string& model : {kGpt + ",tied,dropout=0.25) ", kLlama + ") "}) {
    must_hold(model + "mesh(dp_shard=2,tp=2) zero3(recompute=1," + rest);
    must_hold(model + "mesh(dp_shard=1,tp=2) zero3(sp=1," + rest);
    for (const char* attention : {"ring", "gathered"})
      must_hold(model + "mesh(dp_shard=1,cp=3) zero3(attention=" + attention + "," + rest);
  }
}

namespace {

using Operation = std::function<at::Tensor(const std::vector<at::Tensor>&)>;

// The output and the gradients of the float64 inputs, on the CPU.
std::vector<at::Tensor> results_of(const Operation& operation, const std::vector<at::Tensor>& inputs, c10::Device device) {
  std::vector<at::Tensor> there, wanted, results;
  for (const at::Tensor& input : inputs) {
    there.push_back(input.to(device, /*non_blocking=*/false, /*copy=*/true));
    if (input.is_floating_point()) wanted.push_back(there.back().requires_grad_(true));
  }
  const at::Tensor output = operation(there);
  const at::Tensor ahead = at::linspace(-1.3, 1.7, std::max<int64_t>(output.numel(), 1), at::kDouble);
  results = torch::autograd::grad({output}, wanted, {ahead.narrow(0, 0, output.numel()).view(output.sizes()).to(device)}, {},
                                  false, /*allow_unused=*/true);
  results.push_back(output.detach());
  for (at::Tensor& result : results) result = result.defined() ? result.to(at::kCPU) : result;
  return results;
}

}  // namespace

TEST(DeviceModels, each_canonical_operation_gives_the_cpus_bits_and_gradients) {
  using namespace shardproof;
  fake_device::install();
  at::manual_seed(3);
  const auto random = [](at::IntArrayRef sizes) { return at::randn(sizes, at::kDouble); };
  const std::vector<at::Tensor> heads = {random({2, 4, 3, 5}), random({2, 2, 3, 5}), random({2, 2, 3, 5})};
  const at::Tensor targets = at::tensor({0, 6, 5, -100, 2, 4, 3, 3, 1, -100, 0, 2}, at::kLong).view({4, 3});
  const at::Tensor x = random({4, 3, 7}), tokens = at::tensor({0, 4, 5, -1, 2, 4, 9}, at::kLong);
  const std::vector<std::pair<Operation, std::vector<at::Tensor>>> operations = {
      {[](const auto& in) { return canonical_ops::linear(in[0], in[1], in[2], "l"); }, {x, random({5, 7}), random({5})}},
      {[](const auto& in) { return canonical_ops::linear(in[0], in[1], {}, "l"); }, {x.narrow(2, 0, 0), random({5, 0})}},
      {[](const auto& in) { return canonical_ops::add_bias(in[0], in[1], "b"); }, {x, random({3, 7})}},
      {[](const auto& in) { return canonical_ops::embedding(in[0], in[1], "e"); }, {random({6, 5}), tokens}},
      {[](const auto& in) { return canonical_ops::embedding(in[0], in[1], "e"); }, {random({0, 5}), tokens}},
      {[](const auto& in) { return canonical_ops::layer_norm(in[0], in[1], in[2], 1e-5, "n"); }, {x, random({7}), random({7})}},
      {[](const auto& in) { return canonical_ops::rms_norm(in[0], in[1], 1e-5, "n"); }, {x, random({7})}},
      {[](const auto& in) { return canonical_ops::round(in[0]); }, {x}},
      {[](const auto& in) { return canonical_ops::relu(in[0]); }, {x}},
      {[](const auto& in) { return canonical_ops::tanh(in[0]); }, {x}},
      {[](const auto& in) { return canonical_ops::gelu(in[0]); }, {x}},
      {[](const auto& in) { return canonical_ops::silu(in[0]); }, {x}},
      {[](const auto& in) {
         return canonical_ops::attention(in[0], in[1], in[2], {0, 1, 2}, true, "a");
       },
       heads},
      {[](const auto& in) {
         return canonical_ops::attention(in[0], in[1], in[2], {0, 2, 1}, false, "a", in[3].detach());
       },
       {heads[0], heads[1], heads[2], random({2, 4, 3, 3})}},
      {[](const auto& in) { return canonical_ops::cross_entropy(in[0], in[1], 7); }, {x, targets}},
      {[](const auto& in) { return canonical_ops::dropout(in[0], in[1].detach()); }, {x, random({4, 3, 7})}},
      {[](const auto& in) { return canonical_ops::squared_error(in[0], in[1].detach()); }, {x, random({4, 3, 7})}}};
  for (size_t i = 0; i < operations.size(); ++i) {
    const auto& [operation, inputs] = operations[i];
    const auto here = results_of(operation, inputs, at::kCPU), there = results_of(operation, inputs, fake_device::device());
    for (size_t k = 0; k < here.size(); ++k) {
      ASSERT_EQ(here[k].defined(), there[k].defined());
      if (here[k].defined()) {
        EXPECT_TRUE(here[k].view(at::kLong).equal(there[k].view(at::kLong))) << i << ", result " << k;
      }
    }
  }
  const auto too_large = [&] {
    canonical_ops::linear(x.mul(100).to(fake_device::device()), random({5, 7}).mul(100).to(fake_device::device()), {}, "far");
  };
  EXPECT_THROW(too_large(), NonFiniteError);
}

TEST(DeviceModels, low_precision_and_loss_scaling_have_the_golden_runs_bits_on_a_device) {
  const std::string mesh = ") mesh(dp_shard=3) ";
  must_hold(kGpt + mesh + "zero3(compute=bf16,reduce=bf16,float32_sums=1) adamw(lr=0.01,decay=0.1,clip=0.5) ordered" + kRun);
  must_hold(kLlama + mesh + "zero2(compute=bf16) lion(lr=0.01,clip=0.1) ordered" + kRun);
  must_hold(kGpt + mesh + "zero1(scale=1000000000,compute=fp16) adam(lr=0.01) ordered" + kRun);
}

TEST(DeviceWaits, the_host_waits_for_nothing_in_a_step_whose_gradients_are_not_checked) {
  for (const char* strategy : {"ddp", "zero1", "zero2", "zero3"})
    EXPECT_EQ(waits_of_two_steps({{.strategy = shardproof::strategy(strategy), .check_gradients = false}}), Waits{})
        << strategy;
}

// How many rows an expert has, and where they go, is a number of the host.
TEST(DeviceWaits, the_host_waits_once_for_the_counts_of_a_layer_of_experts) {
  using namespace shardproof;
  fake_device::install();
  const auto waits = [](int64_t rounds) {
    const Waits before = fake_device::host_waits();
    run_threads(
        2,
        [&](std::shared_ptr<Comm> comm) {
          MoeMlp moe(LlamaOptions{.hidden = 8, .router = {.experts = 4}, .expert_intermediate = 6});
          harness::move_to(*moe, fake_device::device());
          const TensorParallel parallel =
              parallelize(moe.ptr(), std::make_shared<MeshComm>(comm, Mesh({{"dp_shard", 2}})),
                          {.styles = {{"experts", ExpertParallel{2}}}});
          const at::Tensor x = at::ones({1, 5, 8}).to(fake_device::device());
          for (int64_t round = 0; round < rounds; ++round) call(moe, x).square().sum().backward();
        },
        {.device = fake_device::device()});
    int64_t times = 0;
    for (const auto& [what, each] : difference(fake_device::host_waits(), before)) times += each;
    return times;
  };
  EXPECT_EQ(waits(3) - waits(1), 2 * 2) << "ranks and rounds";
}

// With checks of gradients, which are on. Whatever else the host asks for comes with their answers.
TEST(DeviceWaits, the_host_waits_once_a_step_whatever_the_step_asks_for) {
  using namespace shardproof;
  const std::map<std::string, std::function<void(Sharded&)>> asked = {
      {"nothing", {}},
      {"a norm of order 2", [](Sharded& sharded) { sharded.clip_gradients(0.1); }},
      {"a norm of order 1", [](Sharded& sharded) { sharded.clip_gradients(0.1, 1); }},
      {"the largest magnitude", [](Sharded& sharded) { sharded.clip_gradients(0.1, INFINITY); }},
      {"whether a scaled loss overflowed",
       [](Sharded& sharded) { EXPECT_TRUE(LossScaler({.initial = 8}).unscale(sharded)); }}};
  for (const char* mesh : {"dp_shard=2", "dp_replicate=2,dp_shard=2"})
    for (const char* name : {"ddp", "zero1", "zero2", "zero3", "hsdp"})
      for (const int64_t microbatches : {1, 3}) {
        if ((std::string(name) == "hsdp") != (std::string(mesh) != "dp_shard=2")) continue;
        for (const auto& [what, ask] : asked) {
          const Loop loop{{.strategy = strategy(name)}, mesh, microbatches, ask};
          EXPECT_EQ(waits_of_two_steps(loop), (Waits{{"event", 2 * loop.ranks()}}))
              << name << ", " << microbatches << " microbatches, " << what;
        }
      }
}

TEST(DeviceWaits, the_host_waits_once_a_step_in_low_precision) {
  using namespace shardproof;
  const Loop loop{{.precision = {.compute = at::kBFloat16}}, "dp_shard=2", 2,
                  [](Sharded& sharded) { sharded.clip_gradients(0.1); }};
  EXPECT_EQ(waits_of_two_steps(loop), (Waits{{"event", 2 * 2}}));
}

// Its optimizer is on the host, which waits for the gradients of both units, for their parameters, and for the answers.
TEST(DeviceWaits, with_offload_the_host_waits_for_what_it_computes_with_and_once_more) {
  using namespace shardproof;
  const auto waits = [](bool check_gradients) {
    return waits_of_two_steps({{.offload = Offload::pinned, .check_gradients = check_gradients}, "dp_shard=2", 2})["event"];
  };
  EXPECT_EQ(waits(true) - waits(false), 2 * 2) << "ranks and steps";
}

namespace {

// Makes one element of the gradient of the last layer's weight bad, and none of the frozen layer before it.
void spoil(at::Tensor output, double value) {
  output.register_hook([value](at::Tensor gradient) {
    at::Tensor bad = gradient.clone();
    bad[0][5] = value;
    return bad;
  });
}

std::vector<at::Tensor> copies(const std::vector<shardproof::Piece>& pieces) {
  std::vector<at::Tensor> all;
  for (const shardproof::Piece& piece : pieces) all.push_back(piece.data.to(at::kCPU, /*non_blocking=*/false, /*copy=*/true));
  return all;
}

}  // namespace

TEST(DeviceChecks, a_gradient_that_is_not_finite_is_named_on_every_rank_before_anything_is_updated) {
  using namespace shardproof;
  fake_device::install();
  using Use = std::function<void(Sharded&, Optimizer&)>;
  const std::vector<Use> uses = {[](Sharded&, Optimizer& optimizer) { optimizer.step(); },
                                 [](Sharded& sharded, Optimizer&) { sharded.clip_gradients(1); },
                                 [](Sharded& sharded, Optimizer&) { sharded.clip_gradients(1, INFINITY); },
                                 [](Sharded& sharded, Optimizer&) { sharded.gradients_are_finite(); },
                                 [](Sharded& sharded, Optimizer&) { sharded.gather_gradients(); },
                                 [](Sharded& sharded, Optimizer&) { gradient_shards(sharded); }};
  for (const char* name : {"ddp", "zero1", "zero2", "zero3"})
    for (const double value : {double{NAN}, -double{INFINITY}, 1e9})
      for (size_t i = 0; i < uses.size(); ++i) {
        // A large one times an input of 0 is 0.
        const std::string place = std::isfinite(value) ? "at element " : "at element 40 of 128";
        // The larger weight of the last layer then lies first in its bucket, and the first layer trains, too.
        const bool whole = i % 3 == 2 && std::string(name) != "ddp";
        const auto body = [&](std::shared_ptr<Comm> comm) {
          Mlp model(MlpOptions{.widths = {8, 8, 16}});
          harness::move_to(*model, fake_device::device());
          model->named_parameters()["layers.0.weight"].requires_grad_(whole);
          model->named_parameters()["layers.0.bias"].requires_grad_(whole);
          Sharded sharded = fully_shard(model.ptr(), std::make_shared<MeshComm>(comm, Mesh({{"dp_shard", 2}})),
                                        {.strategy = strategy(name),
                                         .units = whole ? UnitSelector{} : by_type<torch::nn::LinearImpl>(),
                                         .granularity = whole        ? Granularity::tensor
                                                        : i % 2 == 0 ? Granularity::element
                                                                     : Granularity::row,
                                         .gradient_magnitude_max = 1e8});
          Optimizer optimizer = adamw(sharded, {.lr = 0.1});
          const at::Tensor input = at::ones({3, 8}).to(fake_device::device());
          const auto run = [&](bool bad, bool last) {
            sharded.set_last_microbatch(last);
            const at::Tensor output = call(model, input);
            if (bad && comm->rank() == 1) spoil(output, value);
            output.square().sum().backward();
          };
          run(false, true);
          optimizer.step();
          const std::vector<at::Tensor> before = copies(sharded.main_parameters());
          run(false, false);
          run(true, true);
          if (comm->rank() == 1) EXPECT_THROW(sharded.gradients(), NonFiniteError);
          else EXPECT_NO_THROW(sharded.gradients());
          for (int again = 0; again < 2; ++again)
            expect_error([&] { again ? optimizer.step() : uses[i](sharded, optimizer); },
                         {"rank 1", "step 2", "layers.1.", "NaN or infinite, or above 100000000, " + place});
          const std::vector<at::Tensor> after = copies(sharded.main_parameters());
          for (size_t i = 0; i < before.size(); ++i) EXPECT_TRUE(before[i].equal(after[i])) << name;
          sharded.zero_gradients();
          run(false, true);
          EXPECT_NO_THROW(optimizer.step());
          EXPECT_FALSE(copies(sharded.main_parameters()).back().equal(before.back()));
        };
        run_threads(2, body, {.device = fake_device::device()});
      }
}
