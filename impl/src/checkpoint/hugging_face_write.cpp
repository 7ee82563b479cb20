#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <vector>

#include "checkpoint/format/json_text.h"
#include "checkpoint/hugging_face_families.h"
#include "shardproof/base/check.h"
#include "shardproof/checkpoint/format/weight_names.h"
#include "shardproof/checkpoint/hugging_face.h"

namespace shardproof::checkpoint {
namespace {

using nlohmann::json;

json config_of_gpt(const GptOptions& gpt) {
  return {{"architectures", {"GPT2LMHeadModel"}},
          {"n_layer", gpt.layers},
          {"n_embd", gpt.hidden},
          {"n_head", gpt.heads},
          {"vocab_size", gpt.vocab},
          {"n_positions", gpt.positions},
          {"activation_function", gpt.tanh_gelu ? "gelu_new" : "gelu"},
          {"layer_norm_epsilon", kGptNormEps},
          {"attn_pdrop", gpt.dropout},
          {"embd_pdrop", gpt.dropout},
          {"resid_pdrop", gpt.dropout},
          {"tie_word_embeddings", gpt.tied}};
}

json config_of_experts_with_biases(const std::string& family, const LlamaOptions& llama) {
  const RouterOptions& router = llama.router;
  SHARD_REQUIRE(router.score != RouterScore::sigmoid || router.bias || router.bias_rate > 0, "hugging_face",
                "a {} has a bias of each router's choice, and this model has none: set RouterOptions::bias (expert_lean= or "
                "expert_bias= of a --model)",
                family);
  SHARD_REQUIRE(
      router.score == RouterScore::sigmoid && router.capacity == 0 &&
          router.experts / router.groups >= 2 && llama.shared_intermediate > 0 &&
          llama.shared_intermediate % llama.expert_intermediate == 0,
      "hugging_face",
      "a {} has no such model: its experts are chosen by sigmoid and a bias without a capacity, out of groups of two or more, "
      "and a shared MLP is as wide as some of them together",
      family);
  return {{"n_routed_experts", router.experts},
          {"num_experts_per_tok", router.experts_per_token},
          {"moe_intermediate_size", llama.expert_intermediate},
          {"n_shared_experts", llama.shared_intermediate / llama.expert_intermediate},
          {"n_group", router.groups},
          {"topk_group", router.groups_per_token},
          {"first_k_dense_replace", std::min(llama.dense_layers, llama.layers)},
          {"norm_topk_prob", router.normalized},
          {"routed_scaling_factor", router.scale}};
}

// Of the attention of these families alone.
json config_of_attention(const std::string& family, const LlamaOptions& llama) {
  const int64_t head = llama.features_of_head();
  SHARD_REQUIRE((llama.kv_rank > 0) == is_latent(family), "hugging_face",
                "a {} has no such model: deepseek_v3 alone has latent attention, got kv_rank={}", family, llama.kv_rank);
  SHARD_REQUIRE(llama.rotary_size == 0 || is_latent(family) || family == "glm4_moe", "hugging_face",
                "a {} has no such model: all features of a head turn, got rotary_size={}", family, llama.rotary_size);
  if (is_latent(family))
    return {{"kv_lora_rank", llama.kv_rank},
            {"q_lora_rank", llama.query_rank > 0 ? json(llama.query_rank) : json()},
            {"qk_rope_head_dim", llama.turning_features()},
            {"qk_nope_head_dim", head - llama.turning_features()},
            {"v_head_dim", llama.features_of_value()},
            {"rope_interleave", llama.rope_interleaved}};
  if (family == "qwen2") return json::object();
  json config = {{"head_dim", head}};
  if (family != "glm4_moe") return config;
  // The package cuts a fraction off their product.
  double part = static_cast<double>(llama.turning_features()) / static_cast<double>(head);
  while (static_cast<int64_t>(static_cast<double>(head) * part) < llama.turning_features()) part = std::nextafter(part, 2);
  config.update({{"partial_rotary_factor", part}, {"use_qk_norm", llama.qk_norm}, {"attention_bias", llama.qkv_bias}});
  return config;
}

json config_of_experts(const std::string& family, const LlamaOptions& llama) {
  if (has_router_biases(family)) return config_of_experts_with_biases(family, llama);
  const RouterOptions& router = llama.router;
  const bool mixtral = family == "mixtral";
  // A softmax of the chosen logits is one of all of them whose chosen part is divided by its sum.
  const bool normalized = router.normalized || router.score == RouterScore::chosen_softmax;
  SHARD_REQUIRE(router.score != RouterScore::sigmoid && router.scale == 1 && router.groups_per_token == router.groups &&
                    llama.shared_intermediate == 0 && router.bias_rate == 0 && !router.bias && router.capacity == 0,
                "hugging_face",
                "a {} has no such model: its experts are chosen by softmax out of all, without a bias and a capacity, their "
                "weights are not scaled, and none is shared",
                family);
  SHARD_REQUIRE(!mixtral || (normalized && llama.dense_layers == 0), "hugging_face",
                "a mixtral has no such model: the weights of a token's experts have the sum 1, and every layer has experts");
  if (mixtral)
    return {{"num_local_experts", router.experts},
            {"num_experts_per_tok", router.experts_per_token},
            {"intermediate_size", llama.expert_intermediate}};
  std::vector<int64_t> dense(static_cast<size_t>(std::min(llama.dense_layers, llama.layers)));
  std::iota(dense.begin(), dense.end(), 0);
  return {{"num_experts", router.experts},
          {"num_experts_per_tok", router.experts_per_token},
          {"moe_intermediate_size", llama.expert_intermediate},
          {"norm_topk_prob", normalized},
          {"decoder_sparse_step", 1},
          {"mlp_only_layers", dense}};
}

json config_of_llama(const HuggingFaceModel& model, const LlamaOptions& llama) {
  static const std::map<std::string, std::string> classes = {
      {"llama", "LlamaForCausalLM"}, {"mistral", "MistralForCausalLM"},  {"mixtral", "MixtralForCausalLM"},
      {"qwen2", "Qwen2ForCausalLM"}, {"qwen3", "Qwen3ForCausalLM"},      {"qwen3_moe", "Qwen3MoeForCausalLM"},
      {"dots1", "Dots1ForCausalLM"}, {"glm4_moe", "Glm4MoeForCausalLM"}, {"deepseek_v3", "DeepseekV3ForCausalLM"}};
  const int64_t head = llama.features_of_head();
  const bool chooses = model.family == "glm4_moe", normed = model.family.starts_with("qwen3") || model.family == "dots1";
  SHARD_REQUIRE(
      chooses || (llama.qkv_bias == (model.family == "qwen2") && llama.qk_norm == normed), "hugging_face",
      "a {} has no such model: of these families qwen2 alone has qkv_bias, got {}, the qwen3 and dots1 alone qk_norm, "
      "got {}, and glm4_moe what it says",
      model.family, llama.qkv_bias, llama.qk_norm);
  SHARD_REQUIRE(
      (llama.router.experts > 0) == has_experts(model.family), "hugging_face",
      "a {} has no such model: mixtral, qwen3_moe, dots1, glm4_moe and deepseek_v3 have experts, the others none; got {}",
      model.family, llama.router.experts);
  SHARD_REQUIRE(model.family != "qwen2" || head * llama.heads == llama.hidden, "hugging_face",
                "a qwen2 has heads of hidden / heads features, {} / {}, got {}", llama.hidden, llama.heads, head);
  json config = {{"architectures", {classes.at(model.family)}},
                 {"num_hidden_layers", llama.layers},
                 {"hidden_size", llama.hidden},
                 {"num_attention_heads", llama.heads},
                 {"num_key_value_heads", llama.kv_heads},
                 {"intermediate_size", llama.intermediate},
                 {"vocab_size", llama.vocab},
                 {"max_position_embeddings", std::max<int64_t>(1, model.positions)},
                 {"rms_norm_eps", llama.norm_eps},
                 {"rope_theta", llama.rope_theta},
                 {"hidden_act", "silu"},
                 {"attention_dropout", llama.attention_dropout},
                 {"tie_word_embeddings", llama.tied}};
  if (has_experts(model.family)) config.update(config_of_experts(model.family, llama));
  config.update(config_of_attention(model.family, llama));
  if (const RopeScaling& rope = llama.rope_scaling; rope.yarn)
    config["rope_scaling"] = {{"rope_type", "yarn"},
                              {"factor", rope.factor},
                              {"beta_slow", rope.low_turns},
                              {"beta_fast", rope.high_turns},
                              {"mscale", rope.mscale},
                              {"mscale_all_dim", rope.mscale},
                              {"original_max_position_embeddings", rope.positions}};
  else if (rope.factor != 1)
    config["rope_scaling"] = {{"rope_type", "llama3"},
                              {"factor", rope.factor},
                              {"low_freq_factor", rope.low_turns},
                              {"high_freq_factor", rope.high_turns},
                              {"original_max_position_embeddings", rope.positions}};
  const bool sees_all = model.family == "llama" || chooses || is_latent(model.family);
  SHARD_REQUIRE(llama.window == 0 || !sees_all, "hugging_face",
                "a {} has no such model: its queries see all keys before them, got window={}", model.family, llama.window);
  SHARD_REQUIRE(llama.full_layers == 0 || has_full_layers(model.family), "hugging_face",
                "a {} has no such model: of these families qwen2, qwen3 and dots1 alone have layers with a window and without, "
                "got full_layers={}",
                model.family, llama.full_layers);
  const json window = llama.window > 0 ? json(llama.window) : json();
  if (!sees_all) config["sliding_window"] = window;
  if (model.family.starts_with("qwen")) config["use_sliding_window"] = llama.window > 0;
  if (model.family.starts_with("qwen") || model.family == "dots1") config["max_window_layers"] = llama.full_layers;
  return config;
}

json config_of(const HuggingFaceModel& model) {
  const auto* gpt = std::get_if<GptOptions>(&model.options);
  SHARD_REQUIRE((gpt != nullptr) == (model.family == "gpt2"), "hugging_face", "a {} is no {}", gpt ? "Gpt" : "Llama",
                model.family);
  return gpt ? config_of_gpt(*gpt) : config_of_llama(model, std::get<LlamaOptions>(model.options));
}

// The text that the model was read from, with what is otherwise now.
json changed_source(const HuggingFaceModel& model, const json& now) {
  json source = parse_json(model.source, "source");
  const json was = config_of(parse_hugging_face_config(model.source, "source"));
  const auto differs = [&](const char* key) { return was.value(key, json()) != now.value(key, json()); };
  if (differs("rope_theta") || differs("rope_scaling") || differs("partial_rotary_factor")) {
    source.erase("rope_parameters");
    if (now.contains("partial_rotary_factor")) source["partial_rotary_factor"] = now.at("partial_rotary_factor");
    source["rope_theta"] = now.at("rope_theta");
    source["rope_scaling"] = now.value("rope_scaling", json());
  }
  if (differs("num_experts") || differs("num_local_experts"))
    for (const char* word : {"num_experts", "num_local_experts"}) source.erase(word);
  if (differs("n_routed_experts")) source.erase("num_local_experts");
  if (differs("qk_rope_head_dim")) source.erase("head_dim");
  if (differs("sliding_window") || differs("max_window_layers") || differs("num_hidden_layers")) {
    source.erase("layer_types");
    if (now.contains("max_window_layers")) source["max_window_layers"] = now.at("max_window_layers");
  }
  if (differs("mlp_only_layers")) source["decoder_sparse_step"] = 1;
  for (const auto& [key, value] : now.items())
    if (differs(key.c_str())) source[key] = value;
  return source;
}

}  // namespace

std::string hugging_face_config(const HuggingFaceModel& model, Dtype dtype) {
  require_family(model.family);
  json config = config_of(model);
  if (model.source.empty())
    for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id"}) config[key] = nullptr;
  else
    config = changed_source(model, config);
  config["model_type"] = model.family;
  // The library's models draft no tokens, and the package takes a config that does not say so to have a layer that does.
  for (const char* word : {"num_mtp_layers", "num_nextn_predict_layers"}) config.erase(word);
  if (has_drafts(model.family)) config["num_nextn_predict_layers"] = 0;
  if (config.contains("dtype")) config.erase("torch_dtype");
  config[config.contains("dtype") ? "dtype" : "torch_dtype"] = dtype_info(dtype).name;
  return config.dump(2) + "\n";
}

}  // namespace shardproof::checkpoint
