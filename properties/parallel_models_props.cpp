// GPT and Llama on random meshes beside their unsharded selves.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "expect_error.h"
#include "shardproof/shardproof.h"
#include "toy_modules.h"

using namespace shardproof;

namespace {

struct ModelRun {
  std::vector<double> losses, norms;
  std::vector<std::pair<std::string, at::Tensor>> parameters;
};

struct Setting {
  int64_t dp = 1, tp = 1;
  bool sequence = false;
  const char* strategy = "zero3";
  std::string str() const { return fmt::format("dp {} tp {} sequence {} {}", dp, tp, sequence, strategy); }
};

struct Model {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor(at::Tensor)> forward;
  ParallelPlan plan;
};
using MakeModel = std::function<Model(const Setting&)>;

constexpr int64_t kVocab = 13;
GptOptions small_gpt(bool tied) {
  return {.layers = 2, .hidden = 12, .heads = 6, .vocab = kVocab, .positions = 8, .tied = tied};
}

MakeModel gpt_of(bool tied) {
  return [tied](const Setting& setting) {
    Gpt gpt(small_gpt(tied));
    return Model{gpt.ptr(), [gpt](at::Tensor tokens) mutable { return call(gpt, tokens); },
                 gpt_plan(small_gpt(tied), setting.sequence)};
  };
}

MakeModel llama_of(bool tied, int64_t kv_heads) {
  return [=](const Setting& setting) {
    const LlamaOptions options{.layers = 2, .hidden = 24, .heads = 6, .kv_heads = kv_heads, .intermediate = 10, .vocab = kVocab,
                               .tied = tied};
    Llama llama(options);
    return Model{llama.ptr(), [llama](at::Tensor tokens) mutable { return call(llama, tokens); },
                 llama_plan(options, setting.tp, setting.sequence)};
  };
}

at::Tensor tokens_of(int64_t step, int64_t microbatch, int64_t length) {
  return (at::arange(2 * length, at::kLong) * 5 + step * 3 + microbatch * 7).remainder(kVocab).view({2, length});
}

// Three steps of two microbatches each, in double. Without ranks it is the run without any parallelism.
ModelRun train(const MakeModel& make, const Setting& setting, int64_t length) {
  ModelRun run;
  run_threads(setting.dp * setting.tp, [&](std::shared_ptr<Comm> comm) {
    auto comms = std::make_shared<MeshComm>(comm, Mesh({{"dp_shard", setting.dp}, {"tp", setting.tp}}));
    Model model = make(setting);
    initialize_parameters(*model.module, 3, 0.3);
    model.module->to(at::kDouble);
    const TensorParallel parallel = parallelize(model.module, comms, model.plan);
    Sharded sharded = fully_shard(model.module, comms,
                                  {.strategy = strategy(setting.strategy),
                                   .units = by_type<GptBlockImpl, LlamaLayerImpl>(),
                                   .gradient_divide = 2});
    Optimizer optimizer = adamw(sharded, {.lr = 0.01});
    const int64_t rank = comms->mesh().coordinate(comm->rank(), "dp_shard"), rounds = 2 / setting.dp;
    for (int64_t step = 0; step < 3; ++step) {
      at::Tensor sum = at::zeros({1}, at::kDouble);
      for (int64_t k = 0; k < rounds; ++k) {
        sharded.set_last_microbatch(k + 1 == rounds);
        const at::Tensor tokens = tokens_of(step, rank * rounds + k, length);
        const at::Tensor loss =
            vocab_parallel_cross_entropy(model.forward(tokens), tokens.roll(1, 1), kVocab, comms->along({"tp"}));
        loss.backward();
        sum += loss.detach();
      }
      comms->along({"dp_shard"}).all_reduce(sum).wait();
      const double norm = sharded.clip_gradients(0.5);
      optimizer.step();
      if (comm->rank() == 0) run.losses.push_back(sum.item<double>()), run.norms.push_back(norm);
    }
    const auto whole = sharded.gather_parameters();
    if (comm->rank() == 0) run.parameters = whole;
  });
  return run;
}

// In double another order of sums moves the 15th digit; a term left out, or taken twice, moves the first. Adam's first steps
// make a tiny gradient a whole step, so that parameters are compared more coarsely than norms.
void expect_same_run(const ModelRun& golden, const ModelRun& run, const std::string& where) {
  for (size_t i = 0; i < golden.losses.size(); ++i) {
    EXPECT_NEAR(run.losses[i], golden.losses[i], 1e-11) << where;
    EXPECT_NEAR(run.norms[i], golden.norms[i], 1e-11 * golden.norms[i]) << where;
  }
  ASSERT_EQ(run.parameters.size(), golden.parameters.size());
  for (size_t i = 0; i < golden.parameters.size(); ++i) {
    EXPECT_EQ(golden.parameters[i].first, run.parameters[i].first);
    const at::Tensor difference = golden.parameters[i].second - run.parameters[i].second;
    EXPECT_LT(difference.abs().max().item<double>(), 1e-8) << where << " " << golden.parameters[i].first;
  }
}

void expect_equal_on_meshes(const MakeModel& make, const std::vector<Setting>& settings) {
  for (const int64_t length : {8, 7}) {
    const ModelRun golden = train(make, {}, length);
    EXPECT_NE(golden.losses[0], golden.losses[2]);
    for (const Setting& setting : settings)
      expect_same_run(golden, train(make, setting, length), fmt::format("{} length {}", setting.str(), length));
  }
}

}  // namespace

TEST(TensorParallel, a_gpt_on_any_mesh_trains_as_the_unsharded_one) {
  for (const bool tied : {false, true})
    expect_equal_on_meshes(gpt_of(tied), {{1, 2, false, "zero3"},
                                          {2, 2, false, "zero3"},
                                          {2, 3, true, "zero3"},
                                          {1, 2, true, "ddp"},
                                          {2, 2, true, "zero2"},
                                          {2, 2, true, "zero1"},
                                          {1, 6, false, "zero3"},
                                          {1, 3, true, "zero3"}});
}

TEST(TensorParallel, a_llama_on_any_mesh_trains_as_the_unsharded_one) {
  for (const bool tied : {false, true})
    expect_equal_on_meshes(llama_of(tied, 3), {{1, 2, false, "zero3"}, {2, 3, true, "zero3"}, {1, 2, true, "ddp"}});
}

TEST(TensorParallel, key_heads_that_are_fewer_than_ranks_are_held_in_copies_whose_gradients_are_summed) {
  expect_equal_on_meshes(llama_of(false, 1), {{1, 2, false, "zero3"}, {2, 3, true, "zero2"}, {1, 6, true, "zero3"}});
  expect_equal_on_meshes(llama_of(false, 2), {{1, 6, false, "zero3"}, {2, 6, true, "zero3"}});
}
TEST(TensorParallel, a_module_without_a_style_is_refused_when_the_sequence_is_split) {
  expect_error([] {
    run_threads(2, [](std::shared_ptr<Comm> comm) {
      const GptOptions options = small_gpt(true);
      Gpt model(options);
      ParallelPlan plan = gpt_plan(options, true);
      std::erase_if(plan.styles, [](const auto& style) { return style.first == "ln_f"; });
      const auto parallel = parallelize(model.ptr(), std::make_shared<MeshComm>(comm, Mesh({{"tp", 2}})), plan);
    });
  }, {"ln_f", "SequenceParallel"});
}

TEST(TensorParallel, a_model_built_without_memory_has_the_bits_of_the_unsharded_initialization) {
  const GptOptions options = small_gpt(true);
  Gpt plain(options);
  initialize_parameters(*plain, 5);
  const auto expected = plain->named_parameters();
  run_threads(4, [&](std::shared_ptr<Comm> comm) {
    auto comms = std::make_shared<MeshComm>(comm, Mesh({{"dp_shard", 2}, {"tp", 2}}));
    std::shared_ptr<GptImpl> model;
    {
      const MetaInit meta;
      model = Gpt(options).ptr();
    }
    const TensorParallel parallel = parallelize(model, comms, gpt_plan(options));
    ShardOptions shard = toy::options("zero3");
    shard.initialize = normal_initializer(5);
    shard.broadcast_initial_values = false;
    Sharded sharded = fully_shard(model, comms, shard);
    for (const auto& [name, value] : sharded.gather_parameters()) EXPECT_TRUE(toy::same_bits(value, expected[name])) << name;
  });
}
