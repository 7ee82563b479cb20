#include "shardproof/checkpoint/hugging_face.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include "checkpoint/format/cause.h"
#include "checkpoint/format/json_text.h"
#include "checkpoint/hugging_face_families.h"
#include "shardproof/base/check.h"
#include "shardproof/checkpoint/format/weight_names.h"
#include "shardproof/checkpoint/weights.h"

namespace shardproof::checkpoint {
namespace {

using nlohmann::json;

constexpr uint64_t kModelConfigBytesMax = 1 << 24;
constexpr int64_t kIntegerMax = 1 << 30;  // so that products of two fit

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
    "aux_loss_alpha seq_aux ep_size auto_map num_nextn_predict_layers num_mtp_layers "  // of training, and of drafts
    "transformers.js_config unsloth_fixed unsloth_version attn_implementation _attn_implementation "
    "_attn_implementation_autoset _attn_implementation_internal ";

// Keys for which the package takes null, in all families or in those named; who asks for a key says what its null means. With
// null for any other key the package fails, or computes something else than without the key.
constexpr std::pair<std::string_view, std::string_view> kNulls[] = {
    {"num_key_value_heads", " llama qwen2 qwen3 dots1 deepseek_v3 "},
    {"head_dim", " llama mistral mixtral "},
    {"partial_rotary_factor", " llama mistral mixtral qwen2 qwen3 qwen3_moe dots1 deepseek_v3 "},
    {"", " n_inner sliding_window layer_types mlp_only_layers q_lora_rank rope_scaling rope_parameters beta_fast beta_slow "
         "scoring_func topk_method moe_layer_freq num_nextn_predict_layers num_mtp_layers "}};

// A config.json under its path, for messages. It notes what was asked for.
class Config {
 public:
  Config(std::string path, json values, std::string family = "")
      : path_(std::move(path)), family_(std::move(family)), values_(std::move(values)) {}

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

  bool has(const char* key) const {
    if (!names(key)) return false;
    const auto may_be_null = [&](const auto& item) {
      const std::string word = item.first.empty() ? key : family_;
      return (item.first.empty() || item.first == key) && item.second.find(" " + word + " ") != item.second.npos;
    };
    require(!values_.at(key).is_null() || std::ranges::any_of(kNulls, may_be_null),
            fmt::format("{} is null, by which the package's {} fails, or means something else than by leaving it out. Give its "
                        "value, or take it out of a copy of the file",
                        key, family_));
    return !values_.at(key).is_null();
  }
  int64_t integer(const char* key) const {
    require(has(key), fmt::format("it has no {}", key));
    const json& value = values_.at(key);
    require(value.is_number_integer() && value.get<int64_t>() > 0 && value.get<int64_t>() <= kIntegerMax,
            fmt::format("{} should be a whole number above 0 and at most {}, and is {}", key, kIntegerMax, value.dump()));
    return value.get<int64_t>();
  }
  int64_t integer(const char* key, int64_t otherwise) const { return has(key) ? integer(key) : otherwise; }
  int64_t count(const char* key, int64_t otherwise) const {
    return has(key) && values_.at(key) == 0 ? 0 : integer(key, otherwise);
  }
  double number(const char* key, std::optional<double> otherwise = {}) const {
    require(has(key) || otherwise, fmt::format("it has no {}", key));
    if (!has(key)) return *otherwise;
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
  Config inside(const char* key) const { return {path_ + ": " + key, values_.at(key), family_}; }
  bool is_object() const { return values_.is_object(); }
  bool is_empty() const { return values_.empty(); }
  bool names(const char* key) const {
    asked_.insert(key);
    return values_.contains(key);
  }

 private:
  std::string path_, family_;
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
  config.require(
      config.number("layer_norm_epsilon", kGptNormEps) == kGptNormEps,
      fmt::format("layer_norm_epsilon is {}, and a Gpt's is {}", config.number("layer_norm_epsilon", 0), kGptNormEps));
  config.require(config.flag("scale_attn_weights", true) && !config.flag("scale_attn_by_inverse_layer_idx", false) &&
                     !config.flag("add_cross_attention", false),
                 "its attention is scaled otherwise than a Gpt's, or attends to another model");
  return gpt;
}

// What the package multiplies cosines and sines by is then 1.
RopeScaling yarn_of(const Config& rope) {
  const double factor = rope.number("factor"), mscale = rope.number("mscale", 0), all = rope.number("mscale_all_dim", 0);
  rope.require(factor >= 1, fmt::format("factor is {}, and of yarn at least 1", factor));
  rope.require(mscale == all && all > 0, fmt::format("mscale {} and mscale_all_dim {} should be equal and above 0: else angles "
                                                     "have magnitudes, and a Llama's have none",
                                                     mscale, all));
  rope.require(rope.flag("truncate", true), "truncate is false, and a Llama begins and ends at whole pairs of features");
  return {.factor = factor,
          .low_turns = rope.number("beta_slow", 1),
          .high_turns = rope.number("beta_fast", 32),
          .positions = rope.integer("original_max_position_embeddings"),
          .yarn = true,
          .mscale = all};
}

// Of glm4_moe: how many features of a head turn; 0: all.
int64_t rotary_size_of(const Config& config, double part, int64_t head) {
  const auto size = static_cast<int64_t>(static_cast<double>(head) * part);
  config.require(size > 0 && size % 2 == 0 && size <= head,
                 fmt::format("partial_rotary_factor is {}, so {} of the {} features of a head turn; they should be an even "
                             "number, and at most all",
                             part, size, head));
  return size == head ? 0 : size;
}

void read_rope(const Config& config, const std::string& family, double theta, LlamaOptions& llama) {
  const bool takes_part = family == "glm4_moe";
  double part = config.number("partial_rotary_factor", takes_part ? 0.5 : 1);
  llama.rope_theta = config.number("rope_theta", theta);
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    if (!config.has(key)) continue;
    const Config rope = config.inside(key);
    config.require(rope.is_object(), fmt::format("{} should be an object", key));
    if (rope.is_empty()) continue;
    const std::string kind = rope.text("rope_type", rope.text("type", "default"));
    const bool yarn = kind == "yarn" && is_latent(family);
    config.require(kind == "default" || kind == "llama3" || yarn,
                   fmt::format("its rotary positions are of the type '{}' ({}); known are default and llama3, and yarn of "
                               "deepseek_v3",
                               kind, key));
    part = rope.number("partial_rotary_factor", part);
    if (yarn) llama.rope_scaling = yarn_of(rope);
    llama.rope_theta = rope.number("rope_theta", llama.rope_theta);
    if (kind == "llama3")
      llama.rope_scaling = {rope.number("factor"), rope.number("low_freq_factor"), rope.number("high_freq_factor"),
                            rope.integer("original_max_position_embeddings")};
    rope.require_nothing_else("");
    break;  // the package takes the first, and so two are an error
  }
  config.require(takes_part || part == 1, "only a part of a head turns, and of a Llama's all, but of glm4_moe");
  if (takes_part) llama.rotary_size = rotary_size_of(config, part, llama.features_of_head());
}

// The sliding window, where one is in use; 0: none.
int64_t window_of(const Config& config, const std::string& family) {
  if (family == "mixtral") return config.integer("sliding_window", 0);
  if (family == "mistral" || family == "dots1")
    return config.names("sliding_window") ? config.integer("sliding_window", 0) : 4096;
  if (!family.starts_with("qwen") || !config.flag("use_sliding_window", false)) return 0;
  return config.names("sliding_window") ? config.integer("sliding_window", 0) : 4096;
}

// How far its layers see: all that came before, or a window from one layer on.
void read_window(const Config& config, const std::string& family, LlamaOptions& llama) {
  const bool by_layer = has_full_layers(family);
  const double full = config.number("max_window_layers", family == "dots1" ? 62 : 28);
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
  if (family == "dots1") return {32, 0, 2048};
  if (family == "glm4_moe") return {8, 0, 4096 * 32, 10000, 1e-5};
  if (family == "deepseek_v3") return {128, 0, 4096};
  return {32, family == "qwen3" ? 128 : 0, 32768};
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

void read_experts_with_biases(const Config& config, const std::string& family, LlamaOptions& llama) {
  const bool dots = family == "dots1", deepseek = family == "deepseek_v3";
  const auto said = [&](const char* key, int64_t otherwise) {
    return dots ? config.integer(key) : config.integer(key, otherwise);
  };
  RouterOptions& router = llama.router;
  const char* word = config.has("num_local_experts") ? "num_local_experts" : "n_routed_experts";
  router = {.experts = said(word, deepseek ? 256 : 128),
            .experts_per_token = said("num_experts_per_tok", 8),
            .score = RouterScore::sigmoid,
            .normalized = config.flag("norm_topk_prob", !dots),
            .scale = config.number("routed_scaling_factor", deepseek ? 2.5 : 1),
            .groups = config.integer("n_group", deepseek ? 8 : 1),
            .groups_per_token = config.integer("topk_group", deepseek ? 4 : 1),
            .bias = true};
  config.require(config.integer("n_routed_experts", router.experts) == router.experts,
                 "n_routed_experts and num_local_experts are two words for one number, and differ");
  llama.expert_intermediate = config.integer("moe_intermediate_size", deepseek ? 2048 : 1408);
  llama.shared_intermediate = said("n_shared_experts", 1) * llama.expert_intermediate;
  llama.dense_layers = std::min(llama.layers, config.count("first_k_dense_replace", dots ? 0 : deepseek ? 3 : 1));
  // What the files of the models' authors say, and the package takes for granted.
  const std::string score = config.text("scoring_func", "sigmoid");  // of dots.llm1 it is called as the method is
  config.require((score == "sigmoid" || (dots && score == "noaux_tc")) && config.text("topk_method", "noaux_tc") == "noaux_tc",
                 fmt::format("scoring_func is '{}' and topk_method '{}', and those of a {} are sigmoid and noaux_tc",
                             score, config.text("topk_method", "noaux_tc"), family));
  config.require(config.integer("moe_layer_freq", 1) == 1,
                 "moe_layer_freq is not 1, and every layer behind the dense ones has experts");
}

void read_latents(const Config& config, LlamaOptions& llama) {
  const int64_t turning = config.integer("qk_rope_head_dim", 64);
  llama.kv_rank = config.integer("kv_lora_rank", 512);
  llama.query_rank = config.names("q_lora_rank") ? config.integer("q_lora_rank", 0) : 1536;
  llama.rotary_size = turning;
  llama.head_size = config.integer("qk_nope_head_dim", 128) + turning;
  llama.value_size = config.integer("v_head_dim", 128);
  llama.rope_interleaved = config.flag("rope_interleave", true);
  config.names("qk_head_dim");  // which the package finds by itself
  config.require(config.integer("head_dim", turning) == turning,
                 fmt::format("head_dim is {}, by which a deepseek_v3 turns so many features, and qk_rope_head_dim is {}. They "
                             "should be equal, or head_dim left out",
                             config.integer("head_dim", turning), turning));
  config.require(turning % 2 == 0 && llama.head_size % 2 == 0 && llama.value_size <= llama.head_size,
                 fmt::format("qk_rope_head_dim {} and its sum with qk_nope_head_dim, {}, should be even, and v_head_dim {} at "
                             "most that sum",
                             turning, llama.head_size, llama.value_size));
  config.require(
      llama.kv_heads == llama.heads,
      fmt::format("num_key_value_heads is {}, and latent attention has as many as heads, {}", llama.kv_heads, llama.heads));
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
  if (has_router_biases(family))
    read_experts_with_biases(config, family, llama);
  else if (has_experts(family))
    read_experts(config, family, llama);
  llama.norm_eps = config.number("rms_norm_eps", otherwise.eps);
  llama.tied = config.flag("tie_word_embeddings", false);
  const bool glm = family == "glm4_moe";
  llama.qk_norm = family.starts_with("qwen3") || family == "dots1" || (glm && config.flag("use_qk_norm", false));
  llama.qkv_bias = family == "qwen2" || (glm && config.flag("attention_bias", false));
  read_window(config, family, llama);
  if (family.starts_with("qwen")) config.names("sliding_window");  // which says nothing where it is not in use
  if (is_latent(family)) {
    read_latents(config, llama);
  } else if (const int64_t head = config.integer("head_dim", otherwise.head_size);
             head > 0 && head * llama.heads != llama.hidden) {
    llama.head_size = head;
  }
  config.require(
      (glm || !config.flag("attention_bias", false)) && !config.flag("mlp_bias", false),
      "attention_bias or mlp_bias is true, so its projections have biases, and a Llama's have none but those of Qwen2 "
      "and glm4_moe");
  config.require(config.text("hidden_act", "silu") == "silu",
                 fmt::format("hidden_act is '{}', and a Llama's is silu", config.text("hidden_act", "")));
  config.require(llama.head_size > 0 || llama.hidden % llama.heads == 0,
                 fmt::format("hidden_size {} is no multiple of {} heads", llama.hidden, llama.heads));
  read_rope(config, family, otherwise.theta, llama);
  return llama;
}

}  // namespace

HuggingFaceModel read_hugging_face_config(const std::string& path, FileSystem& files) {
  const std::string file = is_folder(files, path) ? path + "/config.json" : path;
  HuggingFaceModel model = parse_hugging_face_config(read_file(files, file, kModelConfigBytesMax), file);
  if (const std::string beside = path + "/generation_config.json"; exists(files, beside))
    model.generation = read_file(files, beside, kModelConfigBytesMax);
  return model;
}

int64_t draft_layers(const std::string& path, const std::string& family, FileSystem& files) {
  const std::string folder = is_folder(files, path) ? path : std::filesystem::path(path).parent_path().string();
  const std::string file = folder + (folder.empty() ? "" : "/") + "config.json";
  if (!has_drafts(family) || !exists(files, file)) return 0;
  const Config config(file, parse_json(read_file(files, file, kModelConfigBytesMax), file));
  config.require(config.is_object(), "it is no config.json of a model");
  return config.count(config.names("num_nextn_predict_layers") ? "num_nextn_predict_layers" : "num_mtp_layers", 0);
}

HuggingFaceModel parse_hugging_face_config(const std::string& text, const std::string& path) {
  const json values = parse_json(text, path);
  const Config any(path, values);
  any.require(any.is_object(), "it is no config.json of a model");
  HuggingFaceModel model{.family = any.text("model_type", ""), .options = {}, .source = text};
  const Config config(path, values, model.family);
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

}  // namespace shardproof::checkpoint
