// Weights of experts, which are stacks in the model and one by one in the files of their families.
#include <gtest/gtest.h>

#include "properties/kit/expect_error.h"
#include "properties/kit/family_files.h"
#include "shardproof/checkpoint/hugging_face.h"
#include "shardproof/shardproof.h"

namespace shardproof::checkpoint {
namespace {

using namespace family_files;

const std::string kOfMixtral = "model.layers.0.block_sparse_moe.experts.", kOfQwen = "model.layers.0.mlp.experts.";

HuggingFaceModel small_model(const std::string& family) {
  LlamaOptions options{.layers = 1, .hidden = 8, .heads = 2, .kv_heads = 1, .vocab = 5, .qk_norm = family == "qwen3_moe"};
  options.router = {.experts = 11, .experts_per_token = 2};
  options.expert_intermediate = 3;
  return {family, options, 16};
}

const Setup kShared{.dp = 2, .strategy = "zero3", .sharing = 2};

constexpr const char* kBias = "model.layers.0.mlp.gate.e_score_correction_bias";

HuggingFaceModel with_biases(const std::string& family) {
  HuggingFaceModel model = small_model(family);
  auto& options = std::get<LlamaOptions>(model.options);
  options.shared_intermediate = 6;
  options.qk_norm = family == "dots1";
  options.router.score = RouterScore::sigmoid;
  options.router.bias = true;
  if (family != "deepseek_v3") return model;
  options.kv_heads = options.heads;
  options.kv_rank = 3;
  options.query_rank = 2;
  options.head_size = 6;
  options.rotary_size = 2;
  options.value_size = 5;
  return model;
}

}  // namespace

// They choose the experts of a trained model, so they come and go, in float32 whatever the weights are.
TEST(ExpertWeights, of_routers_with_biases_have_those_in_their_files) {
  for (const std::string family : {"dots1", "glm4_moe", "deepseek_v3"}) {
    const HuggingFaceModel model = with_biases(family);
    const at::Tensor biases = at::arange(11).to(at::kFloat) / 7;
    Values stored = by_definition(model, values_of(model, 7));
    stored[kBias] = biases;
    const Scratch scratch;
    write_torch(scratch / "hub.pt", stored);
    on_mesh(model, kShared, 5, [&](Sharded& sharded, int64_t) {
      load_weights(scratch / "hub.pt", sharded, {.family = family});
      save_weights(scratch / "out", sharded, {.family = family, .dtype = Dtype::BFloat16});
    });
    const Values written = read_all(scratch / "out");
    EXPECT_EQ(written.size(), stored.size()) << family;
    for (const auto& [name, value] : stored) EXPECT_TRUE(written.contains(name)) << family << " lacks " << name;
    EXPECT_TRUE(kit::same_bits(written.at(kBias), biases)) << family;
    EXPECT_EQ(written.at("model.norm.weight").scalar_type(), at::kBFloat16) << family;
    stored.erase(kBias);
    write_torch(scratch / "without.pt", stored);
    on_mesh(model, kShared, 5, [&](Sharded& sharded, int64_t) {
      expect_error([&] { load_weights(scratch / "without.pt", sharded, {.family = family}); }, {"lacks", kBias});
    });
  }
}

// What drafts further tokens, in as many layers behind the model's own as the config.json beside the file says. Any other layer
// may be one of the model that the config has forgotten.
TEST(ExpertWeights, of_layers_that_the_config_calls_drafts_are_left_out_of_glm4_moe_and_deepseek_v3_alone) {
  for (const std::string family : {"dots1", "glm4_moe", "deepseek_v3"}) {
    const HuggingFaceModel model = with_biases(family);
    const Values own = by_definition(model, values_of(model, 7));
    const Scratch scratch;
    int64_t number = 0;
    const auto load = [&](const std::string& config, const std::vector<std::string>& more) {
      Values stored = own;
      for (const std::string& name : more) stored[name] = at::zeros({8, 16});
      const std::string file = scratch / fmt::format("{}.pt", ++number);
      write_torch(file, stored);
      spill(scratch / "config.json", config);
      on_mesh(model, {}, 5, [&](Sharded& sharded, int64_t) { load_weights(file, sharded, {.family = family}); });
    };
    const std::string one = R"({"num_nextn_predict_layers": 1})", two = R"({"num_mtp_layers": 2})";
    const std::string next = "model.layers.1.eh_proj.weight", after = "model.layers.2.eh_proj.weight";
    const auto refused = [&](const std::string& config, const std::vector<std::string>& more, const std::string& name) {
      const std::string way_out = family == "dots1" ? "" : "say how many in num_nextn_predict_layers";
      expect_error([&] { load(config, more); }, {"model has no place for " + name, way_out});
    };
    for (const char* none : {"{}", R"({"num_nextn_predict_layers": 0})", R"({"num_nextn_predict_layers": null})",
                             R"({"num_nextn_predict_layers": 0, "num_mtp_layers": 1})"})
      refused(none, {next}, next);
    refused(one, {"model.layers.0.eh_proj.weight"}, "model.layers.0.eh_proj.weight");
    if (family == "dots1") {
      refused(one, {next}, next);
      continue;
    }
    load(one, {next, "layers.1.hnorm.weight"});
    load(two, {next, after});
    refused(one, {next, after}, after);
    expect_error([&] { load(R"({"num_nextn_predict_layers": "one"})", {next}); }, {"num_nextn_predict_layers should be a"});
  }
}

// As hub files have them, whose numbers have another order as texts; as the package's models have them in memory; and of a base
// model, whose names lack "model.".
TEST(ExpertWeights, come_one_by_one_and_in_stacks) {
  for (const std::string family : {"mixtral", "qwen3_moe"}) {
    const HuggingFaceModel model = small_model(family);
    const Values values = values_of(model, 7), hub = by_definition(model, values);
    EXPECT_TRUE(hub.contains(family == "mixtral" ? kOfMixtral + "10.w3.weight" : kOfQwen + "10.up_proj.weight"));
    Values base;
    for (const auto& [name, value] : hub) base[name.starts_with("model.") ? name.substr(6) : name] = value;
    const Scratch scratch;
    write_torch(scratch / "hub.pt", hub);
    write_torch(scratch / "memory.pt", values);
    write_torch(scratch / "base.pt", base);
    for (const char* file : {"hub.pt", "memory.pt", "base.pt"})
      EXPECT_EQ(differences(model, kShared, scratch / file, {.family = family}, values), "") << family << " " << file;
    save_from(model, kShared, 7, scratch / "fused", {.family = family, .projections = Projections::fused});
    EXPECT_EQ(differences(model, {}, scratch / "fused", {.family = family}, values), "") << family;
    EXPECT_EQ(read_all(scratch / "fused").count("model.layers.0.self_attn.qkv_proj.weight"), 1) << family;
    EXPECT_EQ(read_all(scratch / "fused").size(), values.size() - 2) << family;
  }
}

// A module of the package has the names of qwen3_moe without a family.
TEST(ExpertWeights, need_no_family_where_files_have_the_names_of_the_model) {
  const HuggingFaceModel model = small_model("qwen3_moe");
  const Values values = values_of(model, 7);
  const Scratch scratch;
  write_torch(scratch / "hub.pt", by_definition(model, values));
  EXPECT_EQ(differences(model, kShared, scratch / "hub.pt", {}, values), "");
  save_from(model, kShared, 7, scratch / "own", {});
  const Values own = read_all(scratch / "own");
  EXPECT_EQ(own.size(), values.size());
  for (const auto& [name, value] : own) EXPECT_TRUE(kit::same_bits(value, values.at(name))) << name;
}

TEST(ExpertWeights, that_are_missing_too_many_or_of_another_size_are_named_on_every_rank) {
  const HuggingFaceModel model = small_model("mixtral");
  const Values hub = by_definition(model, values_of(model, 7));
  const Scratch scratch;
  int64_t number = 0;
  const auto refused = [&](void (*change)(Values&), std::initializer_list<std::string> parts) {
    Values stored = hub;
    change(stored);
    const std::string path = scratch / fmt::format("changed{}.pt", ++number);
    write_torch(path, stored);
    on_mesh(model, kShared, 5, [&](Sharded& sharded, int64_t) {
      const auto before = sharded.gather_main_parameters();
      expect_error([&] { load_weights(path, sharded, {.family = "mixtral"}); }, parts);
      for (const auto& [name, value] : sharded.gather_main_parameters())
        EXPECT_TRUE(kit::same_bits(value, before.at(name))) << name;
    });
  };
  refused([](Values& stored) { stored.erase(kOfMixtral + "9.w3.weight"); },
          {"some of the 11 experts of model.layers.0.mlp.experts.gate_up_proj", "lacks " + kOfMixtral + "9.w3.weight"});
  refused(
      [](Values& stored) {
        for (const char* matrix : {"w1", "w2", "w3"}) stored.erase(fmt::format("{}0.{}.weight", kOfMixtral, matrix));
      },
      {"0.w", "lacks " + kOfMixtral + "0."});
  refused([](Values& stored) { stored[kOfMixtral + "11.w1.weight"] = stored.at(kOfMixtral + "1.w1.weight"); },
          {"nothing was loaded", "the model has no place for " + kOfMixtral + "11.w1.weight"});
  // As many rows as there should be in all, and not in each.
  refused(
      [](Values& stored) {
        stored[kOfMixtral + "3.w1.weight"] = at::zeros({2, 8});
        stored[kOfMixtral + "3.w3.weight"] = at::zeros({4, 8});
      },
      {"gate_up_proj has the shape [11, 6, 8]", kOfMixtral + "3.w1.weight [2, 8], " + kOfMixtral + "3.w3.weight [4, 8]"});
  refused(
      [](Values& stored) {
        stored[kOfMixtral + "10.w2.weight"] = at::zeros({8, 4});
      },
      {"down_proj has the shape [11, 8, 3]", "the file has " + kOfMixtral + "10.w2.weight [8, 4]"});
  refused([](Values& stored) { stored.erase("model.layers.0.block_sparse_moe.gate.weight"); },
          {"the file lacks model.layers.0.mlp.gate.weight"});
}

TEST(ExpertWeights, of_a_file_without_a_config_are_refused) {
  expect_error(
      [] {
        renamed_parameters("mixtral", {{kOfMixtral + "0.w1.weight", {3, 8}}});
      },
      {kOfMixtral + "0.w1.weight is a part of an expert", "config.json"});
  const auto recipes = renamed_parameters(
      "mixtral", {{"model.layers.0.block_sparse_moe.gate.weight", {11, 8}}, {kOfQwen + "down_proj", {11, 8, 3}}});
  EXPECT_TRUE(recipes.contains("model.layers.0.mlp.gate.weight") && recipes.contains(kOfQwen + "down_proj"));
}

TEST(ExpertWeights, that_no_family_computes_have_no_config) {
  const auto refused = [](const std::string& family, void (*change)(LlamaOptions&), std::initializer_list<std::string> parts) {
    HuggingFaceModel model = small_model(family == "qwen3_moe" ? family : "mixtral");
    model.family = family;
    change(std::get<LlamaOptions>(model.options));
    expect_error([&] { hugging_face_config(model); }, parts);
  };
  using O = LlamaOptions;
  refused("llama", [](O&) {}, {"a llama has no such model", "experts", "got 11"});
  refused("mixtral", [](O& o) { o.router.experts = 0; }, {"a mixtral has no such model", "got 0"});
  refused("mixtral", [](O& o) { o.router.normalized = false; }, {"have the sum 1"});
  refused("mixtral", [](O& o) { o.dense_layers = 1; }, {"every layer has experts"});
  for (const char* family : {"mixtral", "qwen3_moe"}) {
    refused(family, [](O& o) { o.router.score = RouterScore::sigmoid; }, {"chosen by softmax"});
    refused(family, [](O& o) { o.router.scale = 2; }, {"not scaled"});
    refused(family, [](O& o) { o.router.experts = 12, o.router.groups = 2; }, {"out of all"});
    refused(family, [](O& o) { o.shared_intermediate = 4; }, {"none is shared"});
    refused(family, [](O& o) { o.router.capacity = 1; }, {"without a bias and a capacity"});
    refused(family, [](O& o) { o.router.bias = true; }, {"without a bias and a capacity"});
    refused(family, [](O& o) { o.rotary_size = 2; }, {"all features of a head turn", "rotary_size=2"});
  }
  const auto of_biases = [](const std::string& family, void (*change)(LlamaOptions&),
                            std::initializer_list<std::string> parts) {
    HuggingFaceModel model = with_biases(family);
    change(std::get<LlamaOptions>(model.options));
    expect_error([&] { hugging_face_config(model); }, parts);
  };
  for (const char* family : {"dots1", "glm4_moe", "deepseek_v3"}) {
    of_biases(family, [](O& o) { o.router.score = RouterScore::softmax; }, {"chosen by sigmoid"});
    of_biases(family, [](O& o) { o.router.capacity = 1; }, {"without a capacity"});
    of_biases(family, [](O& o) { o.router.bias = false; }, {"has a bias of each router's choice, and this model has none"});
    of_biases(family, [](O& o) { o.router.experts = o.router.groups = 4; }, {"groups of two or more"});
    of_biases(family, [](O& o) { o.shared_intermediate = 4; }, {"as wide as some of them together"});
  }
  of_biases("glm4_moe", [](O& o) { o.window = 2; }, {"see all keys before them", "window=2"});
  of_biases("dots1", [](O& o) { o.qk_norm = false; }, {"a dots1 has no such model"});
  of_biases("glm4_moe", [](O& o) { o.kv_heads = o.heads, o.kv_rank = 2; }, {"deepseek_v3 alone has latent attention"});
  of_biases("deepseek_v3", [](O& o) { o.kv_rank = 0; }, {"deepseek_v3 alone has latent attention", "kv_rank=0"});
}

}  // namespace shardproof::checkpoint
