// Adapters of low rank: what they compute, that no mesh changes a bit of their training, merging, and PEFT's files.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <optional>

#include "properties/kit/bits.h"
#include "properties/kit/checkpoint_scratch.h"
#include "properties/kit/expect_error.h"
#include "properties/kit/toy_modules.h"
#include "shardproof/checkpoint/adapters.h"
#include "shardproof/checkpoint/format/safetensors.h"
#include "shardproof/checkpoint/saved_state.h"
#include "shardproof/checkpoint/weights.h"
#include "shardproof/models/lora.h"

using namespace shardproof;
using Values = std::map<std::string, at::Tensor>;

namespace {

const GptOptions kGpt{.layers = 2, .hidden = 8, .heads = 4, .vocab = 13, .positions = 6, .tied = false};
constexpr int64_t kSamples = 6;

LoraOptions options_of(std::vector<std::string> targets) {
  return {.rank = 3, .alpha = 6, .targets = std::move(targets), .seed = 5};
}

struct Where {
  int64_t dp = 1, tp = 1;
  bool sequence = false, recompute = false, by_leaf = false;
  std::string row = "zero3";
  LoraOptions lora = options_of({"h.*.attn.c_attn", "h.*.attn.c_proj", "h.*.mlp.*", "lm_head"});
  std::string str() const {
    return fmt::format("{} on dp {} tp {}, sequence {}, recompute {}, leaves {}, targets {}, dropout {}", row, dp, tp, sequence,
                       recompute, by_leaf, fmt::join(lora.targets, " "), lora.dropout);
  }
};

// One rank's part of a GPT with adapters, in canonical arithmetic.
class Part {
 public:
  Part(const Where& where, const std::shared_ptr<Comm>& world) : where_(where) {
    const Mesh mesh({{"dp_shard", where.dp}, {"tp", where.tp}});
    comms_ = std::make_shared<MeshComm>(world, mesh);
    initialize_parameters(*gpt_, 3, 0.3);
    lora.emplace(add_lora(gpt_.ptr(), where.lora));
    use_canonical_arithmetic(*gpt_);
    parallel_.emplace(parallelize(gpt_.ptr(), comms_, lora->with_styles(gpt_plan(kGpt, where.sequence))));
    ShardOptions options{.strategy = strategy(where.row),
                         .units = where.by_leaf ? by_type<torch::nn::LinearImpl>() : by_type<GptBlockImpl>(),
                         .precision = {.main = at::kFloat, .compute = at::kDouble},
                         .numerics = Numerics::canonical,
                         .gradient_divide = 1};
    if (where.recompute) options.recompute = [](const std::string& name, const torch::nn::Module&) { return !name.empty(); };
    sharded.emplace(fully_shard(gpt_.ptr(), comms_, options));
    optimizer.emplace(adamw(*sharded, {.lr = 0.05}));
  }

  at::Tensor logits(int64_t sample) {
    return call(gpt_, (at::arange(6, at::kLong) * (sample + 2) + sample).remainder(13).view({1, 6}));
  }

  void step() {
    const int64_t own = comms_->mesh().coordinate(comms_->rank(), "dp_shard"), rounds = kSamples / where_.dp;
    for (int64_t round = 0; round < rounds; ++round) {
      sharded->set_last_microbatch(round + 1 == rounds);
      const int64_t sample = own * rounds + round;
      random_stream() = {.seed = static_cast<uint64_t>(steps_ * kSamples + sample)};
      const at::Tensor targets = (at::arange(6, at::kLong) * (sample + 3)).remainder(13).view({1, 6});
      (canonical_ops::cross_entropy(logits(sample), targets, 13, &comms_->along({"tp"})) / kSamples).backward();
    }
    optimizer->step();
    ++steps_;
  }

  std::optional<Lora> lora;
  std::optional<Sharded> sharded;
  std::optional<Optimizer> optimizer;

 private:
  Where where_;
  int64_t steps_ = 0;
  std::shared_ptr<MeshComm> comms_;
  Gpt gpt_{kGpt};
  std::optional<TensorParallel> parallel_;
};

// What a run has after three steps, and after its adapters were merged.
struct Outcome {
  Values trained, merged, momenta;
};

Outcome outcome_of(const Where& where) {
  Outcome outcome;
  run_threads(where.dp * where.tp, [&](std::shared_ptr<Comm> world) {
    Part run(where, world);
    for (int64_t step = 0; step < 3; ++step) run.step();
    Outcome own{run.sharded->gather_main_parameters(), {}, run.optimizer->gather_state("exp_avg")};
    run.lora->merge(*run.sharded);
    own.merged = run.sharded->gather_main_parameters();
    if (world->rank() == 0) outcome = std::move(own);
  });
  return outcome;
}

std::string first_difference(const Values& one, const Values& other) {
  if (one.size() != other.size()) return "other names";
  for (const auto& [name, value] : one)
    if (!kit::same_bits(value, other.at(name))) return name;
  return "";
}

bool is_adapter(const std::string& name) {
  return name.find(".lora_") != std::string::npos;
}

}  // namespace

RC_GTEST_PROP(Lora, trains_and_merges_with_the_bits_of_the_unsharded_run_on_any_mesh, ()) {
  Where one;
  one.lora.targets = *rc::gen::elementOf(std::vector<std::vector<std::string>>{
      one.lora.targets, {"h.*.attn.c_attn"}, {"h.*.mlp.c_proj"}, {"h.1.mlp.c_fc", "lm_head"}});
  one.lora.rank = *rc::gen::inRange<int64_t>(1, 4);
  one.lora.dropout = *rc::gen::element(0.0, 0.25);
  Where many = one;
  many.dp = *rc::gen::element<int64_t>(1, 2, 3);
  many.tp = *rc::gen::element<int64_t>(1, 2, 4);
  many.sequence = *rc::gen::arbitrary<bool>();
  many.recompute = *rc::gen::arbitrary<bool>();
  many.by_leaf = *rc::gen::arbitrary<bool>();
  many.row = *rc::gen::element<std::string>("ddp", "zero1", "zero2", "zero3");
  const Outcome golden = outcome_of(one), found = outcome_of(many);
  const auto compare = [&](const char* what, const Values& a, const Values& b) {
    if (const std::string name = first_difference(a, b); !name.empty()) RC_FAIL(many.str() + ": " + what + ": " + name);
  };
  compare("trained", golden.trained, found.trained);
  compare("merged", golden.merged, found.merged);
  compare("exp_avg", golden.momenta, found.momenta);
}

TEST(Lora, trains_adapters_and_nothing_else) {
  run_threads(2, [&](std::shared_ptr<Comm> world) {
    Part run({.dp = 2}, world);
    const Values before = run.sharded->gather_main_parameters();
    for (int64_t step = 0; step < 2; ++step) run.step();
    for (const auto& [name, value] : run.sharded->gather_main_parameters())
      EXPECT_EQ(kit::same_bits(value, before.at(name)), !is_adapter(name)) << name;
    for (const auto& [name, value] : run.optimizer->gather_state("exp_avg")) EXPECT_TRUE(is_adapter(name)) << name;
  });
}

// By the formula, with plain operations and autograd, for a layer and its bias.
TEST(Lora, adds_the_scaled_product_of_its_two_layers) {
  torch::nn::Linear plain(5, 4);
  initialize_parameters(*plain, 7, 0.3);
  const at::Tensor x = toy::data({3, 5}, 1);
  const at::Tensor down = toy::data({2, 5}, 2).requires_grad_(), up = toy::data({4, 2}, 3).requires_grad_();
  const at::Tensor y = at::linear(x, plain->weight, plain->bias) + at::linear(at::linear(x, down), up) * 1.5;
  y.square().sum().backward();
  run_threads(2, [&](std::shared_ptr<Comm> world) {
    torch::nn::Linear linear(5, 4);
    initialize_parameters(*linear, 7, 0.3);
    EXPECT_EQ(add_lora(torch::nn::Linear(3, 3).ptr(), {.rank = 5, .targets = {""}}).options().alpha, 10) << "twice the rank";
    std::optional<Lora> lora(add_lora(linear.ptr(), {.rank = 2, .alpha = 3, .targets = {""}}));
    Sharded sharded =
        fully_shard(linear.ptr(), std::make_shared<MeshComm>(world, Mesh({{"dp_shard", 2}})), toy::options("zero3"));
    lora.reset();  // the Sharded keeps what it needs
    sharded.write_parameters({{"lora_A.weight", down}, {"lora_B.weight", up}});
    const at::Tensor found = call(linear, x);
    EXPECT_TRUE(kit::same_bits(found.detach(), y.detach()));
    found.square().sum().backward();
    const Values gradients = sharded.gather_gradients();
    ASSERT_EQ(gradients.size(), 2U);
    EXPECT_TRUE(at::allclose(gradients.at("lora_A.weight"), down.grad()));
    EXPECT_TRUE(at::allclose(gradients.at("lora_B.weight"), up.grad()));
  });
}

TEST(Lora, computes_at_first_and_after_a_merge_what_it_computed_before) {
  run_threads(2, [&](std::shared_ptr<Comm> world) {
    const at::NoGradGuard no_grad;
    Gpt bare(kGpt);
    initialize_parameters(*bare, 3, 0.3);
    use_canonical_arithmetic(*bare);
    bare->to(at::kDouble);
    Part run({.dp = 2}, world);
    const at::Tensor tokens = (at::arange(6, at::kLong) * 3 + 1).remainder(13).view({1, 6});
    EXPECT_TRUE(at::allclose(run.logits(1), call(bare, tokens), 0, 1e-12));
    {
      const at::AutoGradMode with_graph(true);
      for (int64_t step = 0; step < 2; ++step) run.step();
    }
    const at::Tensor before = run.logits(1);
    EXPECT_FALSE(at::allclose(before, call(bare, tokens), 0, 1e-3)) << "nothing was learnt";
    run.lora->merge(*run.sharded);
    EXPECT_TRUE(at::allclose(run.logits(1), before, 0, 1e-5));
    for (const auto& [name, value] : run.sharded->gather_main_parameters())
      if (name.ends_with("lora_B.weight")) {
        EXPECT_EQ(value.count_nonzero().item<int64_t>(), 0) << name;
      }
  });
}

TEST(Lora, adapters_are_saved_as_peft_names_them_and_loaded_on_another_mesh) {
  const checkpoint::Scratch scratch;
  Values saved;
  const auto adapters_of = [](const Part& run) {
    Values values = run.sharded->gather_main_parameters();
    std::erase_if(values, [](const auto& item) { return !is_adapter(item.first); });
    return values;
  };
  run_threads(4, [&](std::shared_ptr<Comm> world) {
    Where where{.dp = 2, .tp = 2};
    where.lora.dropout = 0.5;
    Part run(where, world);
    for (int64_t step = 0; step < 2; ++step) run.step();
    checkpoint::save_adapters(scratch / "adapters", *run.sharded, *run.lora,
                              {.base_model = "gpt2", .module_prefix = "transformer.", .fan_in_fan_out = true});
    const Values own = adapters_of(run);
    if (world->rank() == 0) saved = own;
  });
  const auto config = nlohmann::json::parse(checkpoint::slurp(scratch / "adapters/adapter_config.json"));
  EXPECT_EQ(config["peft_type"], "LORA");
  EXPECT_EQ(config["r"], 3);
  EXPECT_EQ(config["lora_alpha"], 6);
  EXPECT_EQ(config["lora_dropout"], 0.5);
  EXPECT_EQ(config["base_model_name_or_path"], "gpt2");
  EXPECT_EQ(config["fan_in_fan_out"], true);
  EXPECT_EQ(config["target_modules"].size(), 9U);
  const auto stored = checkpoint::open_safetensors(checkpoint::system_files(), scratch / "adapters/adapter_model.safetensors");
  EXPECT_EQ(stored.tensors.size(), 18U);
  EXPECT_EQ(stored.tensors.at("base_model.model.transformer.h.0.attn.c_attn.lora_A.weight").sizes, (Shape{3, 8}));
  EXPECT_EQ(stored.tensors.at("base_model.model.transformer.h.0.attn.c_attn.lora_B.weight").sizes, (Shape{24, 3}));
  run_threads(3, [&](std::shared_ptr<Comm> world) {
    Part run({.dp = 3, .row = "zero1"}, world);
    checkpoint::load_adapters(scratch / "adapters", *run.sharded, *run.lora, {.module_prefix = "transformer."});
    EXPECT_EQ(first_difference(adapters_of(run), saved), "");
    expect_error([&] { checkpoint::load_adapters(scratch / "adapters", *run.sharded, *run.lora); },
                 {"and this model has no such adapter"});
    expect_error([&] { checkpoint::load_adapters(scratch / "nowhere", *run.sharded, *run.lora); }, {"nowhere"});
    const std::string there = fmt::format("{}/of_{}", scratch.path(), world->rank());
    std::filesystem::copy(scratch / "adapters", there);
    const auto load_with = [&](const std::string& key, const nlohmann::json& value) {
      auto other = config;
      other[key] = value;
      checkpoint::spill(there + "/adapter_config.json", other.dump());
      checkpoint::load_adapters(there, *run.sharded, *run.lora, {.module_prefix = "transformer."});
    };
    const nlohmann::json others = {{"use_rslora", true},
                                   {"alpha_pattern", {{"lm_head", 9}}},
                                   {"bias", "all"},
                                   {"init_lora_weights", "pissa"},
                                   {"some_new_variant", 1}};
    for (const auto& [key, value] : others.items())
      expect_error([&, &key = key, &value = value] { load_with(key, value); }, {"adapter_config.json", key, "were not loaded"});
    load_with("some_new_variant", nullptr);
    load_with("init_lora_weights", "gaussian");
  });
  run_threads(2, [&](std::shared_ptr<Comm> world) {
    Where other{.dp = 2};
    other.lora.rank = 2;
    Part run(other, world);
    expect_error([&] { checkpoint::load_adapters(scratch / "adapters", *run.sharded, *run.lora); },
                 {"has adapters of rank 3 and alpha 6, and this model of rank 2 and alpha 6"});
  });
}

namespace {

struct SharingImpl : torch::nn::LinearImpl {
  explicit SharingImpl(const at::Tensor& with) : LinearImpl(torch::nn::LinearOptions(6, 6).bias(false)) {
    weight = parameters_["weight"] = with;
  }
};

// A layer, and two layers with one weight, or one layer under two names.
struct TwiceImpl : torch::nn::Module {
  explicit TwiceImpl(bool one_layer) {
    register_module("plain", plain);
    register_module("a", a);
    const std::shared_ptr<torch::nn::LinearImpl> sharing = std::make_shared<SharingImpl>(a->weight);
    b = one_layer ? a : torch::nn::Linear(sharing);
    register_module("b", b);
  }
  at::Tensor forward(const at::Tensor& x) { return call(b, at::tanh(call(a, call(plain, x)))); }
  torch::nn::Linear plain{6, 6}, a{torch::nn::LinearOptions(6, 6).bias(false)}, b{nullptr};
};
TORCH_MODULE(Twice);

}  // namespace

TEST(Lora, that_cannot_be_merged_without_a_change_of_what_the_model_computes_is_refused) {
  const auto merged = [](bool one_layer, std::vector<std::string> targets, bool ignored, const std::string& says) {
    run_threads(2, [&](std::shared_ptr<Comm> world) {
      Twice model(one_layer);
      initialize_parameters(*model, 3, 0.5);
      const Lora lora = add_lora(model.ptr(), {.rank = 2, .targets = targets});
      ShardOptions options = toy::options("zero3");
      if (ignored) options.ignored = [](const std::string& name, const at::Tensor&) { return !is_adapter(name); };
      Sharded sharded = fully_shard(model.ptr(), std::make_shared<MeshComm>(world, Mesh({{"dp_shard", 2}})), options);
      Values drawn;
      for (const auto& [name, value] : sharded.gather_main_parameters())
        if (is_adapter(name)) drawn[name] = toy::data(value.sizes().vec(), 4);
      sharded.write_parameters(drawn);
      const at::NoGradGuard no_grad;
      const at::Tensor x = toy::data({3, 6}, 1), before = call(model, x);
      const Values values = sharded.gather_main_parameters();
      if (says.empty())
        lora.merge(sharded);
      else
        expect_error([&] { lora.merge(sharded); }, {"[lora] merge: the weight of layer", says, "nothing was merged"});
      EXPECT_TRUE(at::allclose(call(model, x), before, 0, 1e-5));
      EXPECT_EQ(first_difference(sharded.gather_main_parameters(), values).empty(), !says.empty());
    });
  };
  merged(false, {"plain", "a"}, false, "'a' is 'b.weight' too");
  merged(false, {"plain", "b"}, false, "'b' is 'a.weight' too");
  merged(false, {"plain", "a", "b"}, false, "too, which would compute something else");
  merged(false, {"plain"}, true, "'plain' is no parameter of this Sharded");
  merged(true, {"plain", "a"}, false, "");
}

TEST(Lora, that_was_merged_is_not_saved_until_it_trains_again) {
  const checkpoint::Scratch scratch;
  run_threads(2, [&](std::shared_ptr<Comm> world) {
    Part run({.dp = 2}, world);
    checkpoint::save_adapters(scratch / "new", *run.sharded, *run.lora);
    run.step();
    EXPECT_FALSE(run.lora->is_merged(*run.sharded));
    run.lora->merge(*run.sharded);
    EXPECT_TRUE(run.lora->is_merged(*run.sharded));
    expect_error([&] { checkpoint::save_adapters(scratch / "merged", *run.sharded, *run.lora); },
                 {"these adapters were merged", "Save adapters before merge, or the merged model with save_weights"});
    run.step();
    checkpoint::save_adapters(scratch / "again", *run.sharded, *run.lora);
  });
  EXPECT_TRUE(std::filesystem::exists(scratch / "new/adapter_model.safetensors")) << "what is zero from the start is saved";
  EXPECT_FALSE(std::filesystem::exists(scratch / "merged"));
  EXPECT_TRUE(std::filesystem::exists(scratch / "again/adapter_model.safetensors"));
}

TEST(Lora, a_run_that_goes_on_from_a_checkpoint_knows_what_was_merged_before) {
  const checkpoint::Scratch scratch;
  at::Tensor logits;
  run_threads(2, [&](std::shared_ptr<Comm> world) {
    Part run({.dp = 2}, world);
    run.step();
    checkpoint::save_adapters(scratch / "adapters", *run.sharded, *run.lora);
    checkpoint::save(scratch / "before", *run.sharded, &*run.optimizer);
    run.lora->merge(*run.sharded);
    checkpoint::save(scratch / "after", *run.sharded, &*run.optimizer);
    expect_error([&] { checkpoint::load_adapters(scratch / "adapters", *run.sharded, *run.lora); },
                 {"have the adapters in", "already", "added twice"});
    const at::Tensor own = run.logits(1).detach();
    if (world->rank() == 0) logits = own;
  });
  run_threads(2, [&](std::shared_ptr<Comm> world) {
    Part run({.dp = 1, .tp = 2, .row = "zero1"}, world);
    const auto loads = [&] { checkpoint::load_adapters(scratch / "adapters", *run.sharded, *run.lora); };
    checkpoint::load(scratch / "after", *run.sharded, &*run.optimizer);
    const Values merged = run.sharded->gather_main_parameters();
    EXPECT_TRUE(run.lora->is_merged(*run.sharded));
    expect_error(loads, {"were merged into them", "added twice"});
    expect_error([&] { checkpoint::save_adapters(scratch / "merged", *run.sharded, *run.lora); },
                 {"before the checkpoint was saved that this run loaded"});
    EXPECT_EQ(first_difference(run.sharded->gather_main_parameters(), merged), "") << "a refusal changed something";
    run.step();  // other adapters, which may be saved and loaded
    checkpoint::save_adapters(scratch / "second", *run.sharded, *run.lora);
    checkpoint::load_adapters(scratch / "second", *run.sharded, *run.lora);
    checkpoint::load(scratch / "before", *run.sharded, &*run.optimizer);
    EXPECT_FALSE(run.lora->is_merged(*run.sharded));
    loads();
  });
  run_threads(1, [&](std::shared_ptr<Comm> world) {
    Part run({}, world);
    checkpoint::load(scratch / "after", *run.sharded, &*run.optimizer);
    EXPECT_TRUE(kit::same_bits(run.logits(1).detach(), logits));
    run.lora->merge(*run.sharded);  // of adapters that add nothing
    checkpoint::save_weights(scratch / "weights", *run.sharded);
    checkpoint::load_weights(scratch / "weights", *run.sharded);
    EXPECT_FALSE(run.lora->is_merged(*run.sharded)) << "the weights are those of the file";
  });
}

TEST(Lora, stays_as_it_is_when_the_weights_of_its_base_are_loaded) {
  const checkpoint::Scratch scratch;
  run_threads(2, [&](std::shared_ptr<Comm> world) {
    const auto comms = std::make_shared<MeshComm>(world, Mesh({{"dp_shard", 2}}));
    Gpt base(kGpt);
    initialize_parameters(*base, 17, 0.3);
    Sharded whole = fully_shard(base.ptr(), comms, toy::options("zero3"));
    checkpoint::save_weights(scratch / "base", whole);
    Part run({.dp = 1, .tp = 2}, world);
    run.step();
    checkpoint::save_weights(scratch / "adapted", *run.sharded);
    const Values before = run.sharded->gather_main_parameters(), expected = whole.gather_main_parameters();
    const checkpoint::LoadedWeights loaded = checkpoint::load_weights(scratch / "base", *run.sharded);
    EXPECT_EQ(loaded.missing.size(), 18U);
    for (const auto& [name, value] : run.sharded->gather_main_parameters())
      EXPECT_TRUE(kit::same_bits(value, is_adapter(name) ? before.at(name) : expected.at(name))) << name;
    EXPECT_TRUE(checkpoint::load_weights(scratch / "adapted", *run.sharded).missing.empty());
    EXPECT_EQ(first_difference(run.sharded->gather_main_parameters(), before), "");
  });
  std::map<std::string, checkpoint::SafeTensorSpec> specs;
  for (const auto& [name, weight] : checkpoint::open_weights(checkpoint::system_files(), scratch / "adapted"))
    if (name != "lm_head.lora_B.weight") specs[name] = {weight.dtype, weight.sizes};
  checkpoint::write_safetensors_file(checkpoint::system_files(), scratch / "some.safetensors", specs, [&](const auto& name) {
    return std::string(static_cast<size_t>(numel(specs.at(name).sizes)) * sizeof(float), '\0');
  });
  run_threads(1, [&](std::shared_ptr<Comm> world) {
    Part run({}, world);
    expect_error([&] { checkpoint::load_weights(scratch / "some.safetensors", *run.sharded); },
                 {"the file lacks lm_head.lora_B.weight"});
  });
}

TEST(Lora, that_cannot_be_is_refused) {
  Gpt gpt(kGpt);
  const auto refused = [&](const LoraOptions& options, const std::string& says) {
    expect_error([&] { (void)add_lora(gpt.ptr(), options); }, {says});
  };
  refused({.rank = 0, .targets = {"lm_head"}}, "the rank must be at least 1, got 0");
  refused({.rank = 1}, "no targets");
  refused({.rank = 1, .targets = {"lm_head"}, .dropout = 1}, "the dropout must be at least 0 and below 1, got 1");
  refused({.rank = 1, .targets = {"lm_haed"}}, "target 'lm_haed' fits no torch::nn::Linear");
  refused({.rank = 1, .targets = {"h.*.ln_1"}}, "target 'h.*.ln_1' fits no torch::nn::Linear");
  const Lora lora = add_lora(gpt.ptr(), options_of({"lm_head"}));
  refused(options_of({"lm_head"}), "layer 'lm_head' has an adapter already");
  run_threads(1, [&](std::shared_ptr<Comm> world) {
    const Sharded sharded =
        fully_shard(gpt.ptr(), std::make_shared<MeshComm>(world, Mesh({{"dp_shard", 1}})), toy::options("zero3"));
    refused(options_of({"h.0.mlp.c_fc"}), "is parallel or sharded already");
  });
}
