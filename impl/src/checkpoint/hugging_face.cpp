#include "shardproof/checkpoint/hugging_face.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "checkpoint/format/cause.h"
#include "checkpoint/format/json_text.h"
#include "shardproof/base/check.h"
#include "shardproof/checkpoint/format/weight_names.h"

namespace shardproof::checkpoint {
namespace {

using nlohmann::json;

constexpr uint64_t kModelConfigBytesMax = 1 << 24;
constexpr int64_t kIntegerMax = 1 << 30;  // so that products of two fit
constexpr double kNormEps = 1e-5;  // of the library's layer norms

// What a config.json says that changes no logits of these models: how they were made and are used, and what the package's
// models of these families never read.
constexpr std::string_view kFree =
    " architectures model_type transformers_version torch_dtype dtype _name_or_path use_cache bos_token_id eos_token_id "
    "pad_token_id sep_token_id unk_token_id decoder_start_token_id id2label label2id num_labels problem_type output_attentions "
    "output_hidden_states return_dict return_dict_in_generate initializer_range chunk_size_feed_forward is_decoder "
    "pretraining_tp attention_dropout attn_pdrop embd_pdrop resid_pdrop summary_activation summary_type "
    "summary_first_dropout summary_proj_to_labels summary_use_proj reorder_and_upcast_attn task_specific_params "
    "tokenizer_class "
    "finetuning_task prefix n_ctx gradient_checkpointing max_length min_length do_sample early_stopping num_beams "
    "num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty "
    "no_repeat_ngram_size "
    "encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores forced_bos_token_id forced_eos_token_id "
    "exponential_decay_length_penalty suppress_tokens begin_suppress_tokens max_sequence_length is_llama_config "
    "output_router_logits router_aux_loss_coef "  // of a loss that the caller of the package's model adds
    "transformers.js_config unsloth_fixed unsloth_version attn_implementation _attn_implementation "
    "_attn_implementation_autoset _attn_implementation_internal ";

// A config.json under its path, for messages. It notes what was asked for.
class Config {
 public:
  Config(std::string path, json values) : path_(std::move(path)), values_(std::move(values)) {}

  void require(bool holds, const std::string& what) const { SHARD_REQUIRE(holds, "hugging_face", "{}: {}", path_, what); }
  // What nobody asked for must be off, since each release of the package may compute with further entries.
  void require_nothing_else(std::string_view free) const {
    for (const auto& [key, value] : values_.items())
      require(
          asked_.contains(key) || value.is_null() || value == false || value == "" ||
              (value.is_structured() && value.empty()) || free.find(" " + key + " ") != free.npos,
          fmt::format("it has {}: {}, and what a model computes with that is not known here. If this one computes nothing with "
                      "it, take it out of a copy of the file",
                      key, value.dump(-1, ' ', false, json::error_handler_t::replace)));
  }

  bool has(const char* key) const { return names(key) && !values_.at(key).is_null(); }
  int64_t integer(const char* key) const {
    require(has(key), fmt::format("it has no {}", key));
    const json& value = values_.at(key);
    require(value.is_number_integer() && value.get<int64_t>() > 0 && value.get<int64_t>() <= kIntegerMax,
            fmt::format("{} should be a whole number above 0 and at most {}, and is {}", key, kIntegerMax, value.dump()));
    return value.get<int64_t>();
  }
  int64_t integer(const char* key, int64_t otherwise) const { return has(key) ? integer(key) : otherwise; }
  double number(const char* key, double otherwise) const {
    if (!has(key)) return otherwise;
    require(values_.at(key).is_number(), fmt::format("{} should be a number, and is {}", key, values_.at(key).dump()));
    return values_.at(key).get<double>();
  }
  bool flag(const char* key, bool otherwise) const {
    if (!has(key)) return otherwise;
    require(values_.at(key).is_boolean(), fmt::format("{} should be true or false, and is {}", key, values_.at(key).dump()));
    return values_.at(key).get<bool>();
  }
  std::string text(const char* key, const std::string& otherwise) const {
    if (!has(key)) return otherwise;
    require(values_.at(key).is_string(), fmt::format("{} should be a text, and is {}", key, values_.at(key).dump()));
    return values_.at(key).get<std::string>();
  }
  std::vector<std::string> texts(const char* key) const {
    if (!has(key)) return {};
    const json& list = values_.at(key);
    require(list.is_array() && std::ranges::all_of(list, [](const json& item) { return item.is_string(); }),
            fmt::format("{} should be a list of texts, and is {}", key, list.dump()));
    return list.get<std::vector<std::string>>();
  }
  std::vector<int64_t> numbers(const char* key) const {
    if (!has(key)) return {};
    const json& list = values_.at(key);
    require(list.is_array() && std::ranges::all_of(list, [](const json& item) { return item.is_number_integer(); }),
            fmt::format("{} should be a list of whole numbers, and is {}", key, list.dump()));
    return list.get<std::vector<int64_t>>();
  }
  Config inside(const char* key) const { return {path_ + ": " + key, values_.at(key)}; }
  bool is_object() const { return values_.is_object(); }
  bool is_empty() const { return values_.empty(); }
  bool names(const char* key) const {
    asked_.insert(key);
    return values_.contains(key);
  }

 private:
  std::string path_;
  json values_;
  mutable std::set<std::string> asked_;
};

GptOptions gpt_of(const Config& config) {
  GptOptions gpt;
  gpt.layers = config.integer("n_layer");
  gpt.hidden = config.integer("n_embd");
  gpt.heads = config.integer("n_head");
  gpt.vocab = config.integer("vocab_size");
  gpt.positions = config.integer("n_positions", 1024);
  gpt.tied = config.flag("tie_word_embeddings", true);
  const std::string activation = config.text("activation_function", "gelu_new");
  gpt.tanh_gelu = activation == "gelu_new" || activation == "gelu_pytorch_tanh";
  config.require(gpt.tanh_gelu || activation == "gelu",
                 fmt::format("activation_function is '{}'; known are gelu, gelu_new and gelu_pytorch_tanh", activation));
  const int64_t inner = config.integer("n_inner", 4 * gpt.hidden);
  config.require(inner == 4 * gpt.hidden,
                 fmt::format("the MLP is {} wide, and a Gpt's is four times {}, the hidden size", inner, gpt.hidden));
  config.require(config.number("layer_norm_epsilon", kNormEps) == kNormEps,
                 fmt::format("layer_norm_epsilon is {}, and a Gpt's is {}", config.number("layer_norm_epsilon", 0), kNormEps));
  config.require(config.flag("scale_attn_weights", true) && !config.flag("scale_attn_by_inverse_layer_idx", false) &&
                     !config.flag("add_cross_attention", false),
                 "its attention is scaled otherwise than a Gpt's, or attends to another model");
  return gpt;
}

void read_rope(const Config& config, double theta, LlamaOptions& llama) {
  llama.rope_theta = config.number("rope_theta", theta);
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    if (!config.has(key)) continue;
    const Config rope = config.inside(key);
    config.require(rope.is_object(), fmt::format("{} should be an object", key));
    if (rope.is_empty()) continue;
    const std::string kind = rope.text("rope_type", rope.text("type", "default"));
    config.require(kind == "default" || kind == "llama3",
                   fmt::format("its rotary positions are of the type '{}' ({}); known are default and llama3", kind, key));
    config.require(rope.number("partial_rotary_factor", 1) == 1, "only a part of a head turns, and of a Llama's all");
    llama.rope_theta = rope.number("rope_theta", llama.rope_theta);
    if (kind == "llama3")
      llama.rope_scaling = {rope.number("factor", 1), rope.number("low_freq_factor", 1), rope.number("high_freq_factor", 4),
                            rope.integer("original_max_position_embeddings")};
    rope.require_nothing_else("");
    break;  // the package takes the first, and so two are an error
  }
  config.require(config.number("partial_rotary_factor", 1) == 1, "only a part of a head turns, and of a Llama's all");
}

// The sliding window, where one is in use; 0: none.
int64_t window_of(const Config& config, const std::string& family) {
  if (family == "mixtral") return config.integer("sliding_window", 0);
  if (family == "mistral") return config.names("sliding_window") ? config.integer("sliding_window", 0) : 4096;
  if (!family.starts_with("qwen") || !config.flag("use_sliding_window", false)) return 0;
  return config.names("sliding_window") ? config.integer("sliding_window", 0) : 4096;
}

// How far its layers see: all that came before, or a window from one layer on.
void read_window(const Config& config, const std::string& family, LlamaOptions& llama) {
  const bool by_layer = family == "qwen2" || family == "qwen3";
  const double full = config.number("max_window_layers", 28);
  llama.window = window_of(config, family);
  std::vector<std::string> types = config.texts("layer_types");
  config.require(types.empty() || std::ssize(types) == llama.layers,
                 fmt::format("layer_types has {} entries for {} layers", types.size(), llama.layers));
  if (llama.window == 0) {
    for (const std::string& type : types)
      config.require(type == "full_attention",
                     fmt::format("a layer is of the type '{}', and no sliding window is in use", type));
    return;
  }
  const bool is_listed = !types.empty();
  for (int64_t i = 0; by_layer && !is_listed && i < llama.layers; ++i)
    types.push_back(static_cast<double>(i) < full ? "full_attention" : "sliding_attention");
  for (const std::string& type : types) {
    config.require(type == "full_attention" || type == "sliding_attention",
                   fmt::format("a layer is of the type '{}', and those of a Llama see all that came before or a window", type));
    const bool is_full = type == "full_attention";
    config.require(!is_full || by_layer,
                   fmt::format("a layer is of the type '{}', and every layer of a {} has the window", type, family));
    config.require(!is_full || llama.full_layers == &type - types.data(),
                   "a layer with a window comes before one without, and a Llama's layers without are its first ones");
    llama.full_layers += is_full;
  }
  if (llama.full_layers >= llama.layers) llama.window = llama.full_layers = 0;
}

// What the package takes when a file of this family does not say it.
struct Defaults {
  int64_t kv_heads, head_size, positions;  // 0: the heads; hidden / heads
  double theta = 10000, eps = 1e-6;
};

Defaults defaults_of(const std::string& family) {
  if (family == "llama") return {0, 0, 2048};
  if (family == "mistral") return {8, 0, 4096 * 32};
  if (family == "mixtral") return {8, 0, 4096 * 32, 1e6, 1e-5};
  if (family == "qwen3_moe") return {4, 0, 32768};
  return {32, family == "qwen3" ? 128 : 0, 32768};
}

bool has_experts(const std::string& family) {
  return family == "mixtral" || family == "qwen3_moe";
}

// How many layers, the first ones, have no experts.
int64_t dense_layers_of(const Config& config, int64_t layers) {
  const int64_t step = config.integer("decoder_sparse_step", 1);
  const std::vector<int64_t> listed = config.numbers("mlp_only_layers");
  const auto is_dense = [&](int64_t i) { return (i + 1) % step != 0 || std::ranges::count(listed, i) > 0; };
  int64_t dense = 0;
  while (dense < layers && is_dense(dense)) ++dense;
  for (int64_t i = dense; i < layers; ++i)
    config.require(!is_dense(i), fmt::format("layer {} has experts and layer {} has none, by decoder_sparse_step and "
                                             "mlp_only_layers. Those of a Llama without experts are its first ones",
                                             dense, i));
  return dense;
}

void read_experts(const Config& config, const std::string& family, LlamaOptions& llama) {
  const bool mixtral = family == "mixtral";
  llama.router.experts = config.integer("num_local_experts", config.integer("num_experts", mixtral ? 8 : 128));
  config.require(config.integer("num_experts", llama.router.experts) == llama.router.experts,
                 "num_experts and num_local_experts are two words for one number, and differ");
  llama.router.experts_per_token = config.integer("num_experts_per_tok", mixtral ? 2 : 8);
  llama.router.normalized = mixtral || config.flag("norm_topk_prob", false);
  llama.expert_intermediate = mixtral ? llama.intermediate : config.integer("moe_intermediate_size", 768);
  if (!mixtral) llama.dense_layers = dense_layers_of(config, llama.layers);
  config.require(config.number("router_jitter_noise", 0) == 0,
                 "router_jitter_noise multiplies what a router sees by random numbers, and a Llama's sees what there is");
}

LlamaOptions llama_of(const Config& config, const std::string& family) {
  const Defaults otherwise = defaults_of(family);
  LlamaOptions llama;
  llama.layers = config.integer("num_hidden_layers");
  llama.hidden = config.integer("hidden_size");
  llama.heads = config.integer("num_attention_heads");
  // Where null is written, the package takes as many as heads.
  const bool as_heads = otherwise.kv_heads == 0 || config.names("num_key_value_heads");
  llama.kv_heads = config.integer("num_key_value_heads", as_heads ? llama.heads : otherwise.kv_heads);
  llama.intermediate = config.integer("intermediate_size");
  llama.vocab = config.integer("vocab_size");
  if (has_experts(family)) read_experts(config, family, llama);
  read_rope(config, otherwise.theta, llama);
  llama.norm_eps = config.number("rms_norm_eps", otherwise.eps);
  llama.tied = config.flag("tie_word_embeddings", false);
  llama.qk_norm = family.starts_with("qwen3");
  llama.qkv_bias = family == "qwen2";
  read_window(config, family, llama);
  if (family.starts_with("qwen")) config.names("sliding_window");  // which says nothing where it is not in use
  const int64_t head = config.integer("head_dim", otherwise.head_size);
  if (head > 0 && head * llama.heads != llama.hidden) llama.head_size = head;
  config.require(!config.flag("attention_bias", false) && !config.flag("mlp_bias", false),
                 "its projections have biases, and a Llama's have none but those of Qwen2");
  config.require(config.text("hidden_act", "silu") == "silu",
                 fmt::format("hidden_act is '{}', and a Llama's is silu", config.text("hidden_act", "")));
  config.require(llama.head_size > 0 || llama.hidden % llama.heads == 0,
                 fmt::format("hidden_size {} is no multiple of {} heads", llama.hidden, llama.heads));
  return llama;
}

json config_of_gpt(const GptOptions& gpt) {
  return {{"architectures", {"GPT2LMHeadModel"}},
          {"n_layer", gpt.layers},
          {"n_embd", gpt.hidden},
          {"n_head", gpt.heads},
          {"vocab_size", gpt.vocab},
          {"n_positions", gpt.positions},
          {"activation_function", gpt.tanh_gelu ? "gelu_new" : "gelu"},
          {"layer_norm_epsilon", kNormEps},
          {"attn_pdrop", gpt.dropout},
          {"embd_pdrop", gpt.dropout},
          {"resid_pdrop", gpt.dropout},
          {"tie_word_embeddings", gpt.tied}};
}

json config_of_experts(const std::string& family, const LlamaOptions& llama) {
  const RouterOptions& router = llama.router;
  const bool mixtral = family == "mixtral";
  // A softmax of the chosen logits is one of all of them whose chosen part is divided by its sum.
  const bool normalized = router.normalized || router.score == RouterScore::chosen_softmax;
  SHARD_REQUIRE(router.score != RouterScore::sigmoid && router.scale == 1 && router.groups_per_token == router.groups &&
                    llama.shared_intermediate == 0 && router.bias_rate == 0 && router.capacity == 0,
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
      {"llama", "LlamaForCausalLM"}, {"mistral", "MistralForCausalLM"}, {"mixtral", "MixtralForCausalLM"},
      {"qwen2", "Qwen2ForCausalLM"}, {"qwen3", "Qwen3ForCausalLM"},     {"qwen3_moe", "Qwen3MoeForCausalLM"}};
  const int64_t head = llama.features_of_head();
  SHARD_REQUIRE(
      llama.qkv_bias == (model.family == "qwen2") && llama.qk_norm == model.family.starts_with("qwen3"), "hugging_face",
      "a {} has no such model: of these families qwen2 alone has qkv_bias, got {}, and the qwen3 alone qk_norm, got {}",
      model.family, llama.qkv_bias, llama.qk_norm);
  SHARD_REQUIRE((llama.router.experts > 0) == has_experts(model.family), "hugging_face",
                "a {} has no such model: mixtral and qwen3_moe have experts, the others none; got {}", model.family,
                llama.router.experts);
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
  if (model.family != "qwen2") config["head_dim"] = head;
  if (const RopeScaling& rope = llama.rope_scaling; rope.factor != 1)
    config["rope_scaling"] = {{"rope_type", "llama3"},
                              {"factor", rope.factor},
                              {"low_freq_factor", rope.low_turns},
                              {"high_freq_factor", rope.high_turns},
                              {"original_max_position_embeddings", rope.positions}};
  SHARD_REQUIRE(llama.window == 0 || model.family != "llama", "hugging_face",
                "a llama has no such model: its queries see all keys before them, got window={}", llama.window);
  SHARD_REQUIRE(llama.full_layers == 0 || model.family == "qwen2" || model.family == "qwen3", "hugging_face",
                "a {} has no such model: of these families qwen2 and qwen3 alone have layers with a window and without, got "
                "full_layers={}",
                model.family, llama.full_layers);
  const json window = llama.window > 0 ? json(llama.window) : json();
  if (model.family == "mistral" || model.family == "mixtral") config["sliding_window"] = window;
  if (model.family.starts_with("qwen")) {
    config["use_sliding_window"] = llama.window > 0;
    config["sliding_window"] = window;
    config["max_window_layers"] = llama.full_layers;
  }
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
  if (differs("rope_theta") || differs("rope_scaling")) {
    source.erase("rope_parameters");
    source["rope_theta"] = now.at("rope_theta");
    source["rope_scaling"] = now.value("rope_scaling", json());
  }
  if (differs("num_experts") || differs("num_local_experts"))
    for (const char* word : {"num_experts", "num_local_experts"}) source.erase(word);
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

HuggingFaceModel read_hugging_face_config(const std::string& path, FileSystem& files) {
  const std::string file = is_folder(files, path) ? path + "/config.json" : path;
  HuggingFaceModel model = parse_hugging_face_config(read_file(files, file, kModelConfigBytesMax), file);
  if (const std::string beside = path + "/generation_config.json"; exists(files, beside))
    model.generation = read_file(files, beside, kModelConfigBytesMax);
  return model;
}

HuggingFaceModel parse_hugging_face_config(const std::string& text, const std::string& path) {
  const Config config(path, parse_json(text, path));
  config.require(config.is_object(), "it is no config.json of a model");
  HuggingFaceModel model{.family = config.text("model_type", ""), .options = {}, .source = text};
  const auto& known = weight_families();
  config.require(std::find(known.begin(), known.end(), model.family) != known.end(),
                 fmt::format("its model_type is '{}'; known are {}", model.family, fmt::join(known, ", ")));
  config.require(config.flag("is_causal", true), "its tokens see those that come after them, and those of these models do not");
  if (model.family == "gpt2") {
    const GptOptions gpt = gpt_of(config);
    model.options = gpt;
    model.positions = gpt.positions;
  } else {
    model.options = llama_of(config, model.family);
    model.positions = config.integer("max_position_embeddings", defaults_of(model.family).positions);
  }
  config.require_nothing_else(kFree);
  return model;
}

std::string hugging_face_config(const HuggingFaceModel& model, Dtype dtype) {
  require_family(model.family);
  json config = config_of(model);
  if (model.source.empty())
    for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id"}) config[key] = nullptr;
  else
    config = changed_source(model, config);
  config["model_type"] = model.family;
  if (config.contains("dtype")) config.erase("torch_dtype");
  config[config.contains("dtype") ? "dtype" : "torch_dtype"] = dtype_info(dtype).name;
  return config.dump(2) + "\n";
}

}  // namespace shardproof::checkpoint
