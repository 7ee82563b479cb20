// config.json of model families, both ways.
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <nlohmann/json.hpp>

#include "properties/kit/checkpoint_scratch.h"
#include "properties/kit/expect_error.h"
#include "properties/kit/family_models.h"
#include "shardproof/checkpoint/hugging_face.h"
#include "shardproof/shardproof.h"

namespace shardproof::checkpoint {

using namespace family_models;

RC_GTEST_PROP(HuggingFaceConfig, says_what_the_model_is, ()) {
  HuggingFaceModel model = drawn_model();
  if (auto* llama = std::get_if<LlamaOptions>(&model.options)) {
    const bool sees_all = model.family == "llama" || model.family == "glm4_moe" || model.family == "deepseek_v3";
    if (!sees_all) llama->window = drawn(0, 5);
    if (llama->window > 0 && (model.family == "qwen2" || model.family == "qwen3" || model.family == "dots1"))
      llama->full_layers = drawn(0, llama->layers - 1);
    if (*rc::gen::arbitrary<bool>()) llama->rope_scaling = {8, 1, 4, 64};
    if (model.family == "deepseek_v3" && *rc::gen::arbitrary<bool>()) llama->rope_scaling = {40, 1, 32, 64, /*yarn=*/true, 0.5};
  }
  const Scratch scratch;
  spill(scratch / "config.json", hugging_face_config(model, Dtype::BFloat16));
  const HuggingFaceModel again = read_hugging_face_config(scratch.path());
  RC_ASSERT(again.family == model.family);
  RC_ASSERT(again.positions == model.positions);
  RC_ASSERT(hugging_face_config(again, Dtype::BFloat16) == hugging_face_config(model, Dtype::BFloat16));
  const Values ours = values_of(model, 3), theirs = values_of(again, 3);
  for (const auto& [name, value] : ours) RC_ASSERT(theirs.contains(name) && theirs.at(name).sizes() == value.sizes());
}

// By a text that the package wrote, whose words for the same thing are others than ours.
TEST(HuggingFaceConfig, comes_out_as_it_went_in_with_what_was_changed_since) {
  using nlohmann::json;
  const json source = {{"model_type", "mistral"},
                       {"num_hidden_layers", 2},
                       {"hidden_size", 16},
                       {"num_attention_heads", 2},
                       {"num_key_value_heads", 1},
                       {"intermediate_size", 8},
                       {"vocab_size", 9},
                       {"sliding_window", 8},
                       {"max_position_embeddings", 64},
                       {"eos_token_id", {2, 7}},
                       {"initializer_range", 0.5},
                       {"rope_parameters", {{"rope_theta", 5e5}, {"rope_type", "default"}}},
                       {"dtype", "bfloat16"}};
  const Scratch scratch;
  spill(scratch / "config.json", source.dump());
  spill(scratch / "generation_config.json", R"({"eos_token_id": [2, 7]})");
  HuggingFaceModel model = read_hugging_face_config(scratch.path());
  EXPECT_EQ(model.generation, R"({"eos_token_id": [2, 7]})");
  json expected = source;
  expected["dtype"] = "float32";
  EXPECT_EQ(json::parse(hugging_face_config(model)), expected);
  auto& options = std::get<LlamaOptions>(model.options);
  options.window = 4;
  options.attention_dropout = 0.25;
  options.rope_theta = 100;
  expected.erase("rope_parameters");
  expected.update({{"sliding_window", 4}, {"attention_dropout", 0.25}, {"rope_theta", 100.0}, {"rope_scaling", nullptr}});
  EXPECT_EQ(json::parse(hugging_face_config(model)), expected);
  json layers = {
      {"model_type", "qwen2"}, {"use_sliding_window", true}, {"layer_types", {"full_attention", "sliding_attention"}}};
  layers.update(source, /*merge_objects=*/false);
  layers["model_type"] = "qwen2";
  spill(scratch / "config.json", layers.dump());
  HuggingFaceModel qwen2 = read_hugging_face_config(scratch.path());
  EXPECT_TRUE(json::parse(hugging_face_config(qwen2)).contains("layer_types"));
  // Of what says the same, all that is written has changed.
  for (const auto& [window, full] : {std::pair<int64_t, int64_t>(4, 1), {8, 0}, {0, 0}}) {
    HuggingFaceModel changed = qwen2;
    std::get<LlamaOptions>(changed.options).window = window;
    std::get<LlamaOptions>(changed.options).full_layers = full;
    spill(scratch / "config.json", hugging_face_config(changed));
    const LlamaOptions again = llama_of(read_hugging_face_config(scratch.path()));
    EXPECT_EQ(std::pair(again.window, again.full_layers), std::pair(window, full));
  }
}

TEST(HuggingFaceConfig, defaults_are_those_of_the_package) {
  const Scratch scratch;
  const auto read = [&](const std::string& text) {
    spill(scratch / "config.json", text);
    return read_hugging_face_config(scratch / "config.json");
  };
  const std::string sizes =
      R"("num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 100)";
  const LlamaOptions small = llama_of(read(R"({"model_type": "qwen2", "num_key_value_heads": 2, "rope_theta": 1e6,
                                               "use_sliding_window": false, "sliding_window": 32768,
                                               "tie_word_embeddings": true, )" +
                                           sizes + "}"));
  EXPECT_TRUE(small.qkv_bias && small.tied && !small.qk_norm);
  EXPECT_EQ(small.window, 0);
  EXPECT_EQ(small.rope_theta, 1e6);
  EXPECT_EQ(small.norm_eps, 1e-6);
  EXPECT_EQ(small.head_size, 0);
  const LlamaOptions large = llama_of(read(R"({"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 128,
                                               "rope_parameters": {"rope_type": "default", "rope_theta": 5e6}, )" +
                                           sizes + "}"));
  EXPECT_TRUE(large.qk_norm && !large.qkv_bias);
  EXPECT_EQ(large.head_size, 128);
  EXPECT_EQ(large.rope_theta, 5e6);
  EXPECT_EQ(llama_of(read(R"({"model_type": "mistral", "num_key_value_heads": 2, )" + sizes + "}")).window, 4096);
  EXPECT_EQ(
      llama_of(read(R"({"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": null, )" + sizes + "}")).window,
      0);
  // In layers from max_window_layers on, which are 28 where nothing is said.
  const auto qwen2 = [&](const std::string& more) {
    const LlamaOptions o = llama_of(read(R"({"model_type": "qwen2", "num_key_value_heads": 2, "use_sliding_window": true,
                                             "sliding_window": 64, )" +
                                         more + sizes + "}"));
    return std::pair(o.window, o.full_layers);
  };
  EXPECT_EQ(qwen2(""), std::pair(0L, 0L));
  EXPECT_EQ(qwen2(R"("max_window_layers": 0, )"), std::pair(64L, 0L));
  EXPECT_EQ(qwen2(R"("max_window_layers": 1, )"), std::pair(64L, 1L));
  expect_error([&] { qwen2(R"("layer_types": ["sliding_attention"], )"); }, {"layer_types has 1 entries for 2 layers"});
  EXPECT_EQ(qwen2(R"("layer_types": ["full_attention", "sliding_attention"], )"), std::pair(64L, 1L));
  EXPECT_EQ(qwen2(R"("layer_types": ["full_attention", "full_attention"], "max_window_layers": 0, )"), std::pair(0L, 0L));
  expect_error([&] { qwen2(R"("layer_types": ["sliding_attention", "full_attention"], )"); },
               {"a layer with a window comes before one without"});
}

// What the package writes for a Mixtral and a Qwen3Moe, what hub files say, and what is left out there.
TEST(HuggingFaceConfig, a_window_that_is_null_is_none_and_all_layers_but_of_qwen2_and_qwen3_have_one) {
  const Scratch scratch;
  const auto read = [&](const std::string& text) {
    spill(scratch / "config.json", R"({"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 100, )" +
                                       text + "}");
    return llama_of(read_hugging_face_config(scratch / "config.json"));
  };
  for (const char* family : {"qwen2", "qwen3", "qwen3_moe"})
    EXPECT_EQ(read(fmt::format(R"("model_type": "{}", "use_sliding_window": true, "max_window_layers": 0,
                                  "sliding_window": null)",
                               family))
                  .window,
              0)
        << family;
  EXPECT_EQ(read(R"("model_type": "qwen3_moe", "use_sliding_window": true, "sliding_window": 8)").window, 8);
  for (const char* family : {"mistral", "mixtral"})
    expect_error(
        [&] {
          read(fmt::format(R"("model_type": "{}", "sliding_window": 8, "layer_types": ["full_attention", "full_attention"])",
                           family));
        },
        {"every layer of a", family});
}

TEST(HuggingFaceConfig, of_models_with_experts_says_which_and_where) {
  const Scratch scratch;
  const auto read = [&](const std::string& text) {
    spill(scratch / "config.json", text);
    return read_hugging_face_config(scratch.path());
  };
  const std::string sizes = R"("num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
                               "intermediate_size": 96, "vocab_size": 100})";
  const LlamaOptions mixtral = llama_of(read(R"({"model_type": "mixtral", "num_local_experts": 6, "num_experts_per_tok": 3,
      "output_router_logits": true, "router_aux_loss_coef": 0.02, "router_jitter_noise": 0.0, "sliding_window": null, )" +
                                             sizes));
  EXPECT_EQ(mixtral.router.experts, 6);
  EXPECT_EQ(mixtral.router.experts_per_token, 3);
  EXPECT_TRUE(mixtral.router.normalized && mixtral.router.score == RouterScore::softmax && !mixtral.qk_norm);
  EXPECT_EQ(mixtral.expert_intermediate, 96);
  const LlamaOptions usual = llama_of(read(R"({"model_type": "mixtral", )" + sizes));
  EXPECT_EQ(std::tie(usual.router.experts, usual.router.experts_per_token, usual.rope_theta, usual.norm_eps, usual.window),
            std::make_tuple(8, 2, 1e6, 1e-5, 0));
  for (const char* word : {"num_experts", "num_local_experts"}) {
    HuggingFaceModel model = read(fmt::format(R"({{"model_type": "qwen3_moe", "{}": 5, "num_experts_per_tok": 2, "head_dim": 8,
        "norm_topk_prob": true, "moe_intermediate_size": 24, "decoder_sparse_step": 1, "mlp_only_layers": [1, 0], )",
                                              word) +
                                  sizes);
    auto& qwen3 = std::get<LlamaOptions>(model.options);
    EXPECT_TRUE(qwen3.qk_norm && qwen3.router.normalized);
    EXPECT_EQ(
        std::tie(qwen3.router.experts, qwen3.expert_intermediate, qwen3.intermediate, qwen3.dense_layers, qwen3.head_size),
        std::make_tuple(5, 24, 96, 2, 8));
    qwen3.router.experts = 7;
    qwen3.dense_layers = 1;
    const HuggingFaceModel again = parse_hugging_face_config(hugging_face_config(model), word);
    EXPECT_EQ(llama_of(again).router.experts, 7);
    EXPECT_EQ(llama_of(again).dense_layers, 1);
  }
  const LlamaOptions bare =
      llama_of(read(R"({"model_type": "qwen3_moe", "decoder_sparse_step": 2, "mlp_only_layers": [1], )" + sizes));
  EXPECT_EQ(std::tie(bare.router.experts, bare.router.experts_per_token, bare.expert_intermediate, bare.dense_layers),
            std::make_tuple(128, 8, 768, 3));
  EXPECT_FALSE(bare.router.normalized);
  const auto refuse = [&](const std::string& entry, std::initializer_list<std::string> parts) {
    expect_error([&] { read("{" + entry + ", " + sizes); }, parts);
  };
  refuse(R"("model_type": "mixtral", "router_jitter_noise": 0.1)", {"config.json: router_jitter_noise"});
  refuse(R"("model_type": "mixtral", "num_experts": 4, "num_local_experts": 8)", {"two words for one number"});
  refuse(R"("model_type": "qwen3_moe", "num_experts": 0)", {"num_experts should be a whole number above 0"});
  refuse(R"("model_type": "qwen3_moe", "decoder_sparse_step": 2)", {"layer 1 has experts and layer 2 has none"});
  refuse(R"("model_type": "qwen3_moe", "mlp_only_layers": [2])", {"layer 0 has experts and layer 2 has none"});
  refuse(R"("model_type": "qwen3_moe", "mlp_only_layers": "all")", {"mlp_only_layers should be a list of whole numbers"});
  refuse(R"("model_type": "qwen3_moe", "shared_expert_intermediate_size": 8)", {"shared_expert_intermediate_size"});
  refuse(R"("model_type": "llama", "num_local_experts": 8)", {"num_local_experts"});
  refuse(R"("model_type": "deepseek_v2")", {"'deepseek_v2'", "qwen3_moe, dots1, glm4_moe, deepseek_v3"});
}

// By the words of the files of their authors, which the package overwrites with its own.
TEST(HuggingFaceConfig, of_models_with_latent_attention_or_biases_of_routers_says_all_of_them) {
  const std::string sizes = R"("num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4,
                               "intermediate_size": 96, "vocab_size": 100})";
  const auto read = [&](const std::string& entries) { return parse_hugging_face_config("{" + entries + ", " + sizes, "x"); };
  const std::string of_authors = R"("model_type": "deepseek_v3", "aux_loss_alpha": 0.001, "ep_size": 1, "seq_aux": true,
      "moe_layer_freq": 1, "num_nextn_predict_layers": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
      "auto_map": {"AutoConfig": "x.y"}, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3,
      "moe_intermediate_size": 24, "n_shared_experts": 2, "first_k_dense_replace": 1, "norm_topk_prob": true,
      "kv_lora_rank": 6, "q_lora_rank": null, "qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 10)";
  const std::string yarn = R"(, "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1,
      "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096})";
  const LlamaOptions deepseek = llama_of(read(of_authors + yarn));
  EXPECT_EQ(std::tie(deepseek.kv_rank, deepseek.query_rank, deepseek.rotary_size, deepseek.head_size, deepseek.value_size),
            std::make_tuple(6, 0, 4, 16, 10));
  EXPECT_TRUE(deepseek.rope_interleaved && deepseek.rope_scaling.yarn && deepseek.router.bias);
  EXPECT_EQ(std::tie(deepseek.rope_scaling.factor, deepseek.rope_scaling.low_turns, deepseek.rope_scaling.high_turns,
                     deepseek.rope_scaling.positions, deepseek.rope_scaling.mscale),
            std::make_tuple(40.0, 1.0, 32.0, 4096, 1.0));
  EXPECT_EQ(std::tie(deepseek.router.experts, deepseek.router.groups, deepseek.router.groups_per_token,
                     deepseek.router.experts_per_token, deepseek.expert_intermediate, deepseek.shared_intermediate,
                     deepseek.dense_layers),
            std::make_tuple(8, 4, 2, 3, 24, 48, 1));
  const LlamaOptions bare = llama_of(read(R"("model_type": "deepseek_v3")"));
  EXPECT_EQ(std::tie(bare.kv_rank, bare.query_rank, bare.rotary_size, bare.head_size, bare.value_size, bare.router.experts,
                     bare.router.groups, bare.router.scale, bare.dense_layers),
            std::make_tuple(512, 1536, 64, 192, 128, 256, 8, 2.5, 3));
  const LlamaOptions glm = llama_of(read(R"("model_type": "glm4_moe", "head_dim": 20, "first_k_dense_replace": 0)"));
  EXPECT_EQ(std::tie(glm.rotary_size, glm.head_size, glm.dense_layers, glm.norm_eps), std::make_tuple(10, 20, 0, 1e-5));
  EXPECT_FALSE(glm.qk_norm || glm.qkv_bias);
  const auto inside = R"("model_type": "glm4_moe", "partial_rotary_factor": 0.25, "use_qk_norm": true, "attention_bias": true,
                         "rope_parameters": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 1.0})";
  EXPECT_EQ(llama_of(read(inside)).rotary_size, 0);
  EXPECT_TRUE(llama_of(read(inside)).qk_norm && llama_of(read(inside)).qkv_bias);
  HuggingFaceModel changed = read(inside);
  std::get<LlamaOptions>(changed.options).rotary_size = 4;
  EXPECT_EQ(llama_of(parse_hugging_face_config(hugging_face_config(changed), "x")).rotary_size, 4);
  const std::string dots = R"("model_type": "dots1", "num_experts_per_tok": 2, "n_shared_experts": 1, )";
  EXPECT_EQ(llama_of(read(dots + R"("n_routed_experts": 4)")).window, 0);
  EXPECT_EQ(llama_of(read(dots + R"("num_local_experts": 4, "max_window_layers": 1)")).full_layers, 1);
  const auto refuse = [&](const std::string& entries, std::initializer_list<std::string> parts) {
    expect_error([&] { read(entries); }, parts);
  };
  refuse(R"("model_type": "dots1")", {"x: it has no n_routed_experts"});
  refuse(dots + R"("n_routed_experts": 4, "num_local_experts": 8)", {"two words for one number"});
  refuse(dots + R"("n_routed_experts": 4, "attention_bias": true)", {"attention_bias"});
  refuse(R"("model_type": "glm4_moe", "partial_rotary_factor": 0.2)", {"partial_rotary_factor is 0.2, so 3 of the 16"});
  refuse(R"("model_type": "qwen3_moe", "partial_rotary_factor": 0.5)", {"only a part of a head turns"});
  refuse(R"("model_type": "glm4_moe", "partial_rotary_factor": null)", {"x: partial_rotary_factor is null", "glm4_moe"});
  refuse(R"("model_type": "glm4_moe", "norm_topk_prob": null)", {"x: norm_topk_prob is null"});
  refuse(R"("model_type": "qwen3_moe", "num_local_experts": null)", {"x: num_local_experts is null"});
  refuse(R"("model_type": "qwen2", "head_dim": null)", {"x: head_dim is null"});
  refuse(of_authors + R"(, "rope_interleave": null)", {"x: rope_interleave is null"});
  for (const char* value : {"12", "16", "null"}) refuse(of_authors + R"(, "head_dim": )" + value, {"x: head_dim is", value});
  HuggingFaceModel turned = read(of_authors + R"(, "head_dim": 4, "qk_head_dim": 16)");
  EXPECT_EQ(llama_of(turned).rotary_size, 4);
  std::get<LlamaOptions>(turned.options).rotary_size = 6;
  EXPECT_EQ(llama_of(parse_hugging_face_config(hugging_face_config(turned), "x")).rotary_size, 6);
  // Of drafts, which are not written.
  for (const char* said : {R"(, "num_nextn_predict_layers": 1)", R"(, "num_mtp_layers": 2)", ""}) {
    const std::string written = hugging_face_config(read(R"("model_type": "glm4_moe")" + std::string(said)));
    EXPECT_EQ(nlohmann::json::parse(written).at("num_nextn_predict_layers"), 0) << said;
    EXPECT_FALSE(nlohmann::json::parse(written).contains("num_mtp_layers")) << said;
  }
  for (const auto& [entry, part] : std::map<std::string, std::string>{
           {R"("scoring_func": "softmax")", "scoring_func is 'softmax'"},
           {R"("topk_method": "greedy")", "topk_method 'greedy'"},
           {R"("moe_layer_freq": 2)", "moe_layer_freq is not 1"},
           {R"("attention_bias": true)", "attention_bias"},
           {R"("num_key_value_heads": 2, "num_attention_heads": 4)", "num_key_value_heads is 2"},
           {R"("v_head_dim": 200)", "v_head_dim 200"},
           {R"("qk_rope_head_dim": 3)", "qk_rope_head_dim 3"},
           {R"("sliding_window": 8)", "sliding_window"},
           {R"("rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 8})", "mscale 0 and"},
           {R"("rope_scaling": {"type": "yarn", "factor": 4, "mscale": 1, "mscale_all_dim": 0.5,
               "original_max_position_embeddings": 8})",
            "mscale 1 and mscale_all_dim 0.5"},
           {R"("rope_scaling": {"type": "yarn", "factor": 4, "mscale": 1, "mscale_all_dim": 1, "truncate": false,
               "original_max_position_embeddings": 8})",
            "truncate is false"},
           {R"("rope_scaling": {"type": "yarn", "factor": 4, "mscale": 1, "mscale_all_dim": 1, "attention_factor": 2,
               "original_max_position_embeddings": 8})",
            "attention_factor"}}) {
    const std::string text = R"({"model_type": "deepseek_v3", "num_hidden_layers": 3, "hidden_size": 64, "vocab_size": 100,
                                 "intermediate_size": 96)";
    const bool own_heads = entry.find("heads") != entry.npos;
    expect_error(
        [&] { parse_hugging_face_config(text + (own_heads ? ", " : R"(, "num_attention_heads": 128, )") + entry + "}", "x"); },
        {part});
  }
}

TEST(HuggingFaceConfig, of_what_the_models_cannot_compute_is_refused) {
  const Scratch scratch;
  const auto refuse = [&](const std::string& text, std::initializer_list<std::string> parts) {
    spill(scratch / "config.json", text);
    expect_error([&] { read_hugging_face_config(scratch / "config.json"); }, parts);
  };
  const std::string sizes =
      R"("num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 100})";
  refuse(R"({"model_type": "llama", "rope_scaling": {"rope_type": "yarn", "factor": 4}, )" + sizes, {"config.json", "'yarn'"});
  refuse(R"({"model_type": "llama", "hidden_act": "gelu", )" + sizes, {"hidden_act is 'gelu'"});
  refuse(R"({"model_type": "qwen3", "attention_bias": true, )" + sizes, {"biases"});
  refuse(R"({"model_type": "llama", "rope_scaling": {"rope_type": "llama3", "factor": null}, )" + sizes,
         {"rope_scaling: factor is null"});
  refuse(R"({"model_type": "llama", "rope_scaling": {"rope_type": "llama3", "factor": 8, "high_freq_factor": 4}, )" + sizes,
         {"it has no low_freq_factor"});
  refuse(R"({"model_type": "llama", "num_key_value_heads": "two", )" + sizes, {"num_key_value_heads", "two"});
  refuse(R"({"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 9, "activation_function": "relu"})",
         {"activation_function is 'relu'"});
  refuse(R"({"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 9, "layer_norm_epsilon": 1e-6})",
         {"layer_norm_epsilon"});
  // What other models of the package compute with, and what nobody knows.
  for (
      const char* entry :
      {R"("quantization_config": {"bits": 4})", R"("final_logit_softcapping": 30.0)", R"("per_layer_config": {"0": {}})",
       R"("is_causal": false)", R"("layer_types": ["chunked_attention", "full_attention"])", R"("some_new_key": true)",
       R"("partial_rotary_factor": 0.5)", R"("attention_bias": true)", R"("mlp_bias": true)", R"("sliding_window": 8)",
       R"("rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]})", R"("torchscript": true)",
       R"("is_causal": null)", R"("rope_theta": null)", R"("tie_word_embeddings": null)", R"("rms_norm_eps": null)",
       R"("rope_scaling": {"rope_type": "llama3", "factor": 8, "original_max_position_embeddings": 8, "attention_factor": 2})"})
    refuse(fmt::format(R"({{"model_type": "llama", {}, )", entry) + sizes, {"config.json"});
  for (const char* entry : {R"("some_new_key": null)", R"("rope_interleaved": false)", R"("is_llama_config": true)",
                            R"("layer_types": ["full_attention", "full_attention"])", R"("pruned_heads": {})"}) {
    spill(scratch / "config.json", fmt::format(R"({{"model_type": "llama", {}, )", entry) + sizes);
    EXPECT_NO_THROW(read_hugging_face_config(scratch.path())) << entry;
  }
  for (const char* size : {"0", "-8", "1073741825", "2305843009213693952", "18446744073709551615", "1e3"})
    refuse(fmt::format(R"({{"model_type": "gpt2", "n_layer": 1, "n_embd": {}, "n_head": 2, "vocab_size": 9}})", size),
           {"n_embd should be a whole number above 0 and at most 1073741824", size == std::string("1e3") ? "1000" : size});
  const HuggingFaceModel biased{"llama", LlamaOptions{.qkv_bias = true}, 16};
  expect_error([&] { hugging_face_config(biased); }, {"a llama has no such model", "qkv_bias"});
  const HuggingFaceModel windowed{"llama", LlamaOptions{.window = 4}, 16},
      mixed{"mistral", LlamaOptions{.window = 4, .full_layers = 1}, 16};
  expect_error([&] { hugging_face_config(windowed); }, {"a llama has no such model", "window=4"});
  expect_error([&] { hugging_face_config(mixed); }, {"a mistral has no such model", "full_layers=1"});
}

}  // namespace shardproof::checkpoint
