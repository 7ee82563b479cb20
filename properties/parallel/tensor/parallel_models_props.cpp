// GPT and Llama on random meshes beside their unsharded selves.
#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>

#include "properties/kit/bits.h"
#include "properties/kit/expect_error.h"
#include "properties/kit/parallel_models.h"
#include "properties/kit/toy_modules.h"

using namespace shardproof;
using parallel_models::expect_same;
using parallel_models::gpt;
using parallel_models::gpt_options;
using parallel_models::kVocab;
using parallel_models::llama;
using parallel_models::MakeModel;
using parallel_models::MeshSetting;
using parallel_models::Trained;

namespace {

at::Tensor tokens_of(int64_t step, int64_t microbatch, int64_t length) {
  return (at::arange(2 * length, at::kLong) * 5 + step * 3 + microbatch * 7).remainder(kVocab).view({2, length});
}

// Three steps of two microbatches each, in double. Without ranks it is the run without any parallelism.
Trained train_in_microbatches(const MakeModel& make, const MeshSetting& setting, int64_t length) {
  Trained run;
  run_threads(setting.dp * setting.tp, [&](std::shared_ptr<Comm> comm) {
    auto comms = std::make_shared<MeshComm>(comm, Mesh({{"dp_shard", setting.dp}, {"tp", setting.tp}}));
    parallel_models::Model model = make(setting);
    initialize_parameters(*model.module, 3, 0.3);
    model.module->to(at::kDouble);
    const TensorParallel parallel = parallelize(model.module, comms, model.plan);
    Sharded sharded = fully_shard(
        model.module, comms,
        {.strategy = strategy(setting.strategy), .units = by_type<GptBlockImpl, LlamaLayerImpl>(), .gradient_divide = 2});
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

void expect_equal_in_microbatches(const MakeModel& make, const std::vector<MeshSetting>& settings) {
  for (const int64_t length : {8, 7}) {
    const Trained golden = train_in_microbatches(make, {}, length);
    EXPECT_NE(golden.losses[0], golden.losses[2]);
    for (const MeshSetting& setting : settings)
      expect_same(golden, train_in_microbatches(make, setting, length), fmt::format("{} length {}", setting.str(), length),
                  1e-11);
  }
}

}  // namespace

TEST(TensorParallel, a_gpt_on_any_mesh_trains_as_the_unsharded_one) {
  for (const bool tied : {false, true})
    expect_equal_in_microbatches(gpt(tied), {{1, 1, 2, false, "zero3"},
                                             {2, 1, 2, false, "zero3"},
                                             {2, 1, 3, true, "zero3"},
                                             {1, 1, 2, true, "ddp"},
                                             {2, 1, 2, true, "zero2"},
                                             {2, 1, 2, true, "zero1"},
                                             {1, 1, 6, false, "zero3"},
                                             {1, 1, 3, true, "zero3"}});
}

TEST(TensorParallel, a_llama_on_any_mesh_trains_as_the_unsharded_one) {
  for (const bool tied : {false, true})
    expect_equal_in_microbatches(llama(tied, 3), {{1, 1, 2, false, "zero3"}, {2, 1, 3, true, "zero3"}, {1, 1, 2, true, "ddp"}});
}

TEST(TensorParallel, key_heads_that_are_fewer_than_ranks_are_held_in_copies_whose_gradients_are_summed) {
  expect_equal_in_microbatches(llama(false, 1),
                               {{1, 1, 2, false, "zero3"}, {2, 1, 3, true, "zero2"}, {1, 1, 6, true, "zero3"}});
  expect_equal_in_microbatches(llama(false, 2), {{1, 1, 6, false, "zero3"}, {2, 1, 6, true, "zero3"}});
}

TEST(TensorParallel, a_rank_without_a_head_is_refused) {
  expect_error([] {
    run_threads(4, [](std::shared_ptr<Comm> comm) {
      const GptOptions options{.layers = 1, .hidden = 20, .heads = 5, .vocab = kVocab, .positions = 8};
      Gpt model(options);
      const auto parallel = parallelize(model.ptr(), std::make_shared<MeshComm>(comm, Mesh({{"tp", 4}})), gpt_plan(options));
    });
  }, {"h.0.attn.c_attn", "5 heads", "4 ranks"});
}

TEST(TensorParallel, the_plan_of_a_model_without_layers_fits_it_and_leaves_its_logits) {
  const GptOptions of_gpt{.layers = 0, .hidden = 8, .heads = 2, .vocab = 6, .positions = 8, .tied = false};
  const LlamaOptions of_llama{.layers = 0, .hidden = 8, .heads = 2, .kv_heads = 2, .intermediate = 6, .vocab = 6};
  const at::Tensor tokens = at::arange(6, at::kLong).view({1, 6});
  const auto expect_pieces = [&](auto plain, auto cut, const ParallelPlan& plan, const std::shared_ptr<Comm>& comm) {
    initialize_parameters(*plain, 3, 0.3);
    initialize_parameters(*cut, 3, 0.3);
    const auto parallel = parallelize(cut.ptr(), std::make_shared<MeshComm>(comm, Mesh({{"tp", 2}})), plan);
    const at::Tensor own = call(plain, tokens).narrow(-1, comm->rank() * 3, 3);
    EXPECT_TRUE(at::allclose(call(cut, tokens), own, 0, 1e-6));
  };
  run_threads(2, [&](std::shared_ptr<Comm> comm) {
    expect_pieces(Gpt(of_gpt), Gpt(of_gpt), gpt_plan(of_gpt), comm);
    expect_pieces(Llama(of_llama), Llama(of_llama), llama_plan(of_llama, 2), comm);
  });
}

TEST(TensorParallel, a_module_without_a_style_is_refused_when_the_sequence_is_split) {
  expect_error(
      [] {
        run_threads(2, [](std::shared_ptr<Comm> comm) {
          const GptOptions options = gpt_options(true);
          Gpt model(options);
          ParallelPlan plan = gpt_plan(options, true);
          std::erase_if(plan.styles, [](const auto& style) { return style.first == "ln_f"; });
          const auto parallel = parallelize(model.ptr(), std::make_shared<MeshComm>(comm, Mesh({{"tp", 2}})), plan);
        });
      },
      {"ln_f", "SequenceParallel"});
}

TEST(TensorParallel, a_model_built_without_memory_has_the_bits_of_the_unsharded_initialization) {
  const GptOptions options = gpt_options(true);
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
    for (const auto& [name, value] : sharded.gather_parameters()) EXPECT_TRUE(kit::same_bits(value, expected[name])) << name;
  });
}

// Each rank has the norms of queries and keys whole, and uses them on its own heads.
TEST(TensorParallel, norms_of_queries_and_keys_on_cut_heads_train_like_plain) {
  const std::vector<MeshSetting> settings = {{.tp = 2},
                                             {.tp = 3, .strategy = "ddp"},
                                             {.dp = 2, .tp = 2, .strategy = "zero2"},
                                             {.dp = 2, .tp = 2, .sequence_parallel = true, .recompute = true},
                                             {.cp = 2, .tp = 2}};
  for (const int64_t kv_heads : {6, 1})
    parallel_models::expect_equal_on_meshes(llama(false, kv_heads, 0, /*qk_norm=*/true), settings, {8, 7});
}

// A rank has the biases of its heads; of a key head that several ranks hold, each has the bias, too.
TEST(TensorParallel, biases_of_queries_keys_and_values_on_cut_heads_train_like_plain) {
  const std::vector<MeshSetting> settings = {{.tp = 2},
                                             {.tp = 3, .strategy = "ddp"},
                                             {.dp = 2, .tp = 2, .sequence_parallel = true},
                                             {.cp = 2, .tp = 2}};
  for (const int64_t kv_heads : {6, 1})
    parallel_models::expect_equal_on_meshes(llama(false, kv_heads, 0, /*qk_norm=*/false, /*qkv_bias=*/true), settings, {8, 7});
}

namespace {

MakeModel with_undeclared_norms(bool compares) {
  return [=](const MeshSetting& setting) {
    parallel_models::Model model = llama(false, 6, 0, /*qk_norm=*/true)(setting);
    std::erase_if(model.plan.styles, [](const auto& entry) { return std::holds_alternative<PartialGradients>(entry.second); });
    model.plan.compare_replicas = compares;
    return model;
  };
}

// What each rank's first step throws; empty: nothing.
std::vector<std::string> errors_of_a_step(const MakeModel& make, const MeshSetting& setting) {
  std::vector<std::string> errors(static_cast<size_t>(setting.dp * setting.tp));
  run_threads(setting.dp * setting.tp, [&](std::shared_ptr<Comm> comm) {
    const auto comms = std::make_shared<MeshComm>(comm, Mesh({{"dp_shard", setting.dp}, {"tp", setting.tp}}));
    parallel_models::Model model = make(setting);
    initialize_parameters(*model.module, 3, 0.3);
    const TensorParallel parallel = parallelize(model.module, comms, model.plan);
    const Sharded sharded = fully_shard(model.module, comms,
                                        {.strategy = strategy(setting.strategy), .units = by_type<LlamaLayerImpl>()});
    const at::Tensor tokens = tokens_of(0, comms->mesh().coordinate(comm->rank(), "dp_shard"), 8);
    try {
      vocab_parallel_cross_entropy(model.forward(tokens), tokens, kVocab, comms->along({"tp"})).backward();
    } catch (const Error& error) {
      errors[static_cast<size_t>(comm->rank())] = error.what();
    }
  });
  return errors;
}

}  // namespace

TEST(TensorParallel, a_whole_parameter_whose_gradients_part_is_named_on_every_rank) {
  for (const MeshSetting& setting : {MeshSetting{.dp = 2, .tp = 2}, MeshSetting{.tp = 3, .strategy = "ddp"},
                                     MeshSetting{.dp = 3, .tp = 2, .strategy = "zero1"}}) {
    for (const std::string& error : errors_of_a_step(with_undeclared_norms(/*compares=*/true), setting))
      for (const char* part : {"[tensor_parallel]", "_norm.weight", "along tp", "PartialGradients"})
        EXPECT_NE(error.find(part), std::string::npos) << setting.str() << ": " << error;
    for (const std::string& error : errors_of_a_step(with_undeclared_norms(/*compares=*/false), setting))
      EXPECT_EQ(error, "") << setting.str();
    for (const std::string& error : errors_of_a_step(llama(false, 6, 0, /*qk_norm=*/true), setting))
      EXPECT_EQ(error, "") << setting.str();
  }
}

TEST(TensorParallel, partial_gradients_are_of_whole_parameters) {
  const auto plan_of = [](const char* second) {
    return ParallelPlan{.styles = {{"0", ColumnParallel{}}, {second, PartialGradients{}}}};
  };
  const auto make = [] {
    const torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({2}));
    return torch::nn::Sequential(torch::nn::Linear(4, 4), torch::nn::Tanh(), norm);
  };
  run_threads(2, [&](std::shared_ptr<Comm> comm) {
    const auto comms = std::make_shared<MeshComm>(comm, Mesh({{"tp", 2}}));
    const auto declared = make();
    const TensorParallel parallel = parallelize(declared.ptr(), comms, plan_of("2"));
    for (const ParallelParameter& known : parallel.parameters())
      if (known.layout == replicated()) {
        EXPECT_EQ(known.grad_partial_ranks, 2) << known.name;
      }
    EXPECT_EQ(parallel.parameters().size(), 4u);
    expect_error([&] { const auto other = parallelize(make().ptr(), comms, plan_of("1")); },
                 {"PartialGradients", "'1'", "none"});
  });
}
