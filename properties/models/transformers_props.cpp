// The library's language models beside those of the transformers package, on the same random weights.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>

#include "golden/hugging_face.h"
#include "properties/kit/expect_error.h"
#include "shardproof/checkpoint/hugging_face.h"
#include "shardproof/shardproof.h"

using namespace shardproof;

namespace {

constexpr int64_t kVocab = 13;

struct Result {
  at::Tensor logits;
  golden::Named gradients;
};

golden::Named distinct(const torch::nn::Module& module, bool gradients) {
  golden::Named named;
  std::set<const c10::TensorImpl*> seen;
  for (const auto& item : module.named_parameters())
    if (seen.insert(item.value().unsafeGetTensorImpl()).second)
      named.emplace_back(item.key(), (gradients ? item.value().grad() : item.value().detach()).clone());
  if (gradients) return named;
  for (const auto& item : module.named_buffers()) named.emplace_back(item.key(), item.value().clone());
  return named;
}

// Vectors as well: a bias of zero would prove nothing.
void randomize(torch::nn::Module& module) {
  const Initializer normal = normal_initializer(11, 0.5);
  initialize_parameters(module, [&](const std::string& name, const Shape& shape, Interval run, at::Tensor values) {
    normal(name, {shape.empty() ? 1 : shape[0], numel(shape)}, run, values);
    if (shape.size() < 2 && name.ends_with("weight")) values.mul_(0.5).add_(1);
  });
  const at::NoGradGuard no_grad;  // biases of routers
  for (const at::Tensor& buffer : module.buffers()) buffer.copy_(at::arange(buffer.numel()).remainder(5) * 0.125 - 0.25);
}

at::Tensor tokens() {
  return (at::arange(3 * 9, at::kLong) * 5 + 2).remainder(kVocab).view({3, 9});
}
at::Tensor targets() {
  return (at::arange(3 * 9, at::kLong) * 7 + 1).remainder(kVocab).view({3, 9});
}

template <class Model>
Result run_ours(Model model, at::ScalarType dtype) {
  model->to(dtype);
  const at::Tensor logits = call(model, tokens());
  at::cross_entropy_loss(logits.flatten(0, 1), targets().flatten(), {}, at::Reduction::Sum).backward();
  return {logits.detach(), distinct(*model, /*gradients=*/true)};
}

// The largest difference in any tensor, as a part of that tensor's largest magnitude.
double apart(const Result& a, const Result& b) {
  const auto distance = [](const at::Tensor& x, const at::Tensor& y) {
    return (x.to(at::kDouble) - y.to(at::kDouble)).abs().max().item<double>() / y.abs().max().item<double>();
  };
  double most = distance(a.logits, b.logits);
  EXPECT_EQ(a.gradients.size(), b.gradients.size());
  for (size_t i = 0; i < b.gradients.size(); ++i) {
    EXPECT_EQ(a.gradients[i].first, b.gradients[i].first);
    most = std::max(most, distance(a.gradients[i].second, b.gradients[i].second));
  }
  return most;
}

// Two right programs differ by roundings. Theirs are as many as ours, so the distance of our float32 run from our float64 run
// tells how far theirs may be from that, give or take another order of sums.
constexpr double kSpread = 16;

double distance_of_peer(const golden::PeerRun& peer, const Result& ours) {
  const golden::PeerResult result = golden::run_in_transformers(peer);
  return apart({result.logits, result.gradients}, ours);
}

golden::PeerRun peer_of(std::string config, golden::Named parameters) {
  return {.config = std::move(config), .parameters = std::move(parameters), .tokens = tokens(), .targets = targets()};
}

golden::PeerRun peer_of(const checkpoint::HuggingFaceModel& model, golden::Named parameters) {
  return peer_of(checkpoint::hugging_face_config(model), std::move(parameters));
}

// The same model with another number in its configuration.
golden::PeerRun with(golden::PeerRun peer, const char* key, const nlohmann::json& value) {
  nlohmann::json config = nlohmann::json::parse(peer.config);
  EXPECT_TRUE(config.contains(key)) << key;
  config[key] = value;
  peer.config = config.dump();
  return peer;
}

}  // namespace

// In float64 both, where a hundred roundings are far below 1e-12. Parameters of other names are refused.
TEST(Transformers, a_gpt_has_the_names_logits_and_gradients_of_gpt2) {
  for (const bool tied : {true, false})
    for (const bool tanh_gelu : {true, false}) {
      const GptOptions options{
          .layers = 2, .hidden = 12, .heads = 3, .vocab = kVocab, .positions = 10, .tied = tied, .tanh_gelu = tanh_gelu};
      Gpt model(options);
      randomize(*model);
      const Result ours = run_ours(model, at::kDouble);
      golden::PeerRun peer = peer_of({"gpt2", options, options.positions}, distinct(*model, false));
      peer.dtype = at::kDouble;
      EXPECT_LT(distance_of_peer(peer, ours), 1e-12);
      EXPECT_GT(distance_of_peer(with(peer, "layer_norm_epsilon", 1.01e-5), ours), 1e-9) << "a comparison without teeth";
      peer.parameters[0].first = "wte.weights";
      EXPECT_THROW(golden::run_in_transformers(peer), std::runtime_error);
    }
}

namespace {

// The package computes norms and angles of these families in float32, whatever the model's dtype.
void expect_same_as(const std::string& config, const LlamaOptions& options, const char* key, const nlohmann::json& other) {
  Llama single(options), twice(options);
  randomize(*single);
  randomize(*twice);
  const golden::PeerRun peer = peer_of(config, distinct(*single, false));
  const std::string family = nlohmann::json::parse(config).at("model_type");
  const Result ours = run_ours(twice, at::kDouble);
  const double bound = kSpread * apart(run_ours(single, at::kFloat), ours);
  EXPECT_LT(bound, 1e-3) << family;
  EXPECT_LT(distance_of_peer(peer, ours), bound) << family;
  EXPECT_GT(distance_of_peer(with(peer, key, other), ours), bound) << family << ": a comparison without teeth, " << key;
}

void expect_same_model(const std::string& family, const LlamaOptions& options, const char* key, const nlohmann::json& other) {
  expect_same_as(checkpoint::hugging_face_config({family, options, 32}), options, key, other);
}

LlamaOptions small_llama(int64_t kv_heads, bool tied) {
  return {.layers = 2, .hidden = 24, .heads = 6, .kv_heads = kv_heads, .intermediate = 10, .vocab = kVocab, .tied = tied};
}

}  // namespace

TEST(Transformers, a_llama_has_the_names_logits_and_gradients_of_llama) {
  for (const bool tied : {true, false})
    for (const int64_t kv_heads : {6, 2, 1}) expect_same_model("llama", small_llama(kv_heads, tied), "rms_norm_eps", 1e-3);
  LlamaOptions options = small_llama(2, false);
  options.rope_theta = 500;
  options.rope_scaling = {.factor = 8, .low_turns = 1, .high_turns = 4, .positions = 16};
  options.head_size = 8;
  expect_same_model("llama", options, "rope_theta", 400);
}

TEST(Transformers, llamas_with_biases_norms_and_windows_are_mistral_qwen2_and_qwen3) {
  LlamaOptions mistral = small_llama(2, false), qwen2 = small_llama(2, true), qwen3 = small_llama(2, true);
  mistral.window = 3;
  mistral.head_size = 6;
  expect_same_model("mistral", mistral, "sliding_window", 4);
  qwen2.qkv_bias = true;
  qwen2.rope_theta = 1e6;
  expect_same_model("qwen2", qwen2, "rope_theta", 100);
  qwen2.window = 2;
  qwen2.full_layers = 1;
  expect_same_model("qwen2", qwen2, "max_window_layers", 0);
  qwen3.qk_norm = true;
  qwen3.head_size = 8;
  expect_same_model("qwen3", qwen3, "rms_norm_eps", 1e-2);
}

namespace {

LlamaOptions with_experts(int64_t experts, int64_t per_token) {
  LlamaOptions options = small_llama(2, false);
  options.router = {.experts = experts, .experts_per_token = per_token};
  options.expert_intermediate = 7;
  return options;
}

}  // namespace

TEST(Transformers, llamas_with_experts_are_mixtral_and_qwen3_moe) {
  LlamaOptions mixtral = with_experts(5, 2), qwen3 = with_experts(12, 3);
  expect_same_model("mixtral", mixtral, "num_experts_per_tok", 1);
  mixtral.router.score = RouterScore::chosen_softmax;
  mixtral.window = 3;
  expect_same_model("mixtral", mixtral, "sliding_window", 2);
  qwen3.qk_norm = true;
  qwen3.head_size = 8;
  expect_same_model("qwen3_moe", qwen3, "norm_topk_prob", false);
  qwen3.router.normalized = false;
  qwen3.dense_layers = 1;
  expect_same_model("qwen3_moe", qwen3, "norm_topk_prob", true);
}

namespace {

// The router, experts and shared expert of DeepSeek-V3.
LlamaOptions with_router_biases(bool normalized) {
  LlamaOptions options = with_experts(12, 3);
  options.dense_layers = 1;
  options.shared_intermediate = 2 * options.expert_intermediate;
  options.router = {.experts = 12,
                    .experts_per_token = 3,
                    .score = RouterScore::sigmoid,
                    .normalized = normalized,
                    .scale = 2.5,
                    .groups = 4,
                    .groups_per_token = 2,
                    .bias = true};
  return options;
}

using Changes = std::map<std::string, nlohmann::json>;

void expect_same_model(const std::string& family, const LlamaOptions& options, const Changes& changes) {
  for (const auto& [key, other] : changes) expect_same_model(family, options, key.c_str(), other);
}

// As the package reads this text, and as the library does.
void expect_same_reading(const std::string& text) {
  const auto options = std::get<LlamaOptions>(checkpoint::parse_hugging_face_config(text, "x").options);
  Llama single(options), twice(options);
  randomize(*single);
  randomize(*twice);
  const golden::PeerRun peer = peer_of(text, distinct(*single, false));
  const Result ours = run_ours(twice, at::kDouble);
  const double bound = kSpread * apart(run_ours(single, at::kFloat), ours);
  EXPECT_LT(bound, 1e-3) << text;
  try {
    EXPECT_LT(distance_of_peer(peer, ours), bound) << text;
  } catch (const std::exception& error) {
    ADD_FAILURE() << "the library reads what the package does not: " << error.what() << text;
  }
}

bool is_refused(const std::string& text) {
  try {
    checkpoint::parse_hugging_face_config(text, "x");
  } catch (const Error&) {
    return true;
  }
  return false;
}

// As the family's config says it, and as it is read again.
void expect_same_when_read(const std::string& family, const LlamaOptions& options) {
  const std::string text = checkpoint::hugging_face_config({family, options, 32});
  const checkpoint::HuggingFaceModel again = checkpoint::parse_hugging_face_config(text, family);
  expect_same_as(text, std::get<LlamaOptions>(again.options), "rms_norm_eps", 1e-2);
}

}  // namespace

// Biases of routers have values, so that others would be chosen without them.
TEST(Transformers, llamas_with_biases_of_routers_are_dots1_and_glm4_moe) {
  for (const bool normalized : {true, false}) {
    LlamaOptions dots = with_router_biases(normalized);
    dots.qk_norm = true;
    dots.head_size = 8;
    expect_same_model("dots1", dots,
                      {{"topk_group", 1}, {"n_group", 2}, {"routed_scaling_factor", 2.0}, {"norm_topk_prob", !normalized}});
    dots.window = 2;
    dots.full_layers = 1;
    expect_same_model("dots1", dots, {{"max_window_layers", 0}, {"sliding_window", 3}});
    expect_same_when_read("dots1", dots);
  }
  for (const bool normed : {true, false}) {
    LlamaOptions glm = with_router_biases(true);
    glm.norm_eps = 1e-5;
    glm.head_size = 14;
    glm.rotary_size = normed ? 6 : 2;
    glm.qk_norm = normed;
    glm.qkv_bias = !normed;
    glm.dense_layers = 0;
    expect_same_model("glm4_moe", glm, {{"partial_rotary_factor", 1.0}, {"routed_scaling_factor", 2.0}, {"topk_group", 4}});
    expect_same_when_read("glm4_moe", glm);
    glm.rotary_size = 0;
    expect_same_when_read("glm4_moe", glm);
  }
}

TEST(Transformers, llamas_with_latent_attention_are_deepseek_v3) {
  LlamaOptions options = with_router_biases(true);
  options.kv_heads = options.heads;
  options.head_size = 10;
  options.rotary_size = 4;
  options.kv_rank = 5;
  for (const int64_t query_rank : {0, 7})
    for (const int64_t value_size : {0, 6})
      for (const bool interleaved : {true, false}) {
        options.query_rank = query_rank;
        options.value_size = value_size;
        options.rope_interleaved = interleaved;
        expect_same_model("deepseek_v3", options, {{"rope_interleave", !interleaved}});
        expect_same_when_read("deepseek_v3", options);
      }
  expect_same_model("deepseek_v3", options, {{"rope_theta", 100.0}, {"n_group", 2}, {"rms_norm_eps", 1e-2}});
  options.rotary_size = 6;
  for (const double mscale : {1.0, 0.5}) {
    options.rope_theta = 200;
    options.rope_scaling = {.factor = 8, .low_turns = 1, .high_turns = 4, .positions = 200, .yarn = true, .mscale = mscale};
    nlohmann::json other = {{"rope_type", "yarn"},
                            {"factor", 8.0},
                            {"beta_slow", 1.0},
                            {"beta_fast", 4.0},
                            {"mscale", 0.75},
                            {"mscale_all_dim", 0.75},
                            {"original_max_position_embeddings", 200}};
    expect_same_model("deepseek_v3", options, "rope_scaling", other);
    other["mscale"] = other["mscale_all_dim"] = mscale;
    other["beta_fast"] = 30.0;
    expect_same_model("deepseek_v3", options, "rope_scaling", other);
    expect_same_when_read("deepseek_v3", options);
  }
}

// Each key that is read, and those that the library does not write.
TEST(Transformers, a_null_is_refused_or_means_what_it_means_in_the_package) {
  using nlohmann::json;
  std::map<std::string, LlamaOptions> models = {{"llama", small_llama(2, false)},   {"mistral", small_llama(2, false)},
                                                {"qwen2", small_llama(2, false)},   {"qwen3", small_llama(2, false)},
                                                {"mixtral", with_experts(5, 2)},    {"qwen3_moe", with_experts(12, 3)},
                                                {"dots1", with_router_biases(true)}, {"glm4_moe", with_router_biases(true)},
                                                {"deepseek_v3", with_router_biases(true)}};
  for (auto& [family, options] : models) {
    options.qk_norm = family.starts_with("qwen3") || family == "dots1";
    options.qkv_bias = family == "qwen2";
    if (family == "deepseek_v3") options.kv_heads = 6, options.kv_rank = 5, options.head_size = 10, options.rotary_size = 6;
    if (family == "mistral" || family == "dots1") options.window = 3;
    json config = json::parse(checkpoint::hugging_face_config({family, options, 32}));
    for (const char* key : {"head_dim", "qk_head_dim", "partial_rotary_factor", "rope_scaling", "rope_parameters",
                            "layer_types", "num_experts", "num_local_experts", "scoring_func", "topk_method", "moe_layer_freq",
                            "is_causal", "attention_bias", "mlp_bias", "use_sliding_window", "sliding_window",
                            "router_jitter_noise", "num_mtp_layers"})
      if (!config.contains(key)) config[key] = nullptr;
    int64_t taken = 0;
    for (const auto& [key, value] : config.items()) {
      json changed = json::parse(checkpoint::hugging_face_config({family, options, 32}));
      changed[key] = nullptr;
      if (key == "attention_dropout" || key == "num_mtp_layers" || is_refused(changed.dump())) continue;
      expect_same_reading(changed.dump());
      ++taken;
    }
    EXPECT_GT(taken, 3) << family;
  }
}

// The words and kinds of values of the files of their authors; sizes are others.
TEST(Transformers, the_configs_of_known_models_with_experts_are_read_as_the_package_reads_them) {
  using nlohmann::json;
  const json sizes = {{"hidden_size", 24}, {"intermediate_size", 10},  {"moe_intermediate_size", 7}, {"num_attention_heads", 6},
                      {"vocab_size", 13},  {"num_hidden_layers", 2}, {"num_key_value_heads", 6}};
  const std::string deepseek = R"("architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
      "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "aux_loss_alpha": 0.001, "ep_size": 1,
      "first_k_dense_replace": 1, "hidden_act": "silu", "initializer_range": 0.02, "kv_lora_rank": 5,
      "model_type": "deepseek_v3", "moe_layer_freq": 1, "n_routed_experts": 12, "n_shared_experts": 1, "norm_topk_prob": true,
      "num_experts_per_tok": 3, "pretraining_tp": 1, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "scoring_func": "sigmoid",
      "seq_aux": true, "tie_word_embeddings": false, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
      "transformers_version": "4.33.1", "use_cache": true, "v_head_dim": 6, )";
  const std::string yarn = R"("rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0,
      "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn"}, )";
  const auto config = [&](const std::string& text) {
    json values = sizes;
    values.update(json::parse("{" + text + "}"));
    return values.dump();
  };
  const std::string v3 = deepseek + yarn + R"("q_lora_rank": 7, "n_group": 4, "topk_group": 2, "num_nextn_predict_layers": 1,
      "max_position_embeddings": 163840, "rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 2.5)";
  expect_same_reading(config(v3));
  expect_error(
      [&] {
        checkpoint::parse_hugging_face_config(config(v3 + R"(, "quantization_config": {"quant_method": "fp8"})"), "x");
      },
      {"quantization_config"});
  // Moonlight, and dots.llm1, whose scores are called as its method of choice is.
  expect_same_reading(config(deepseek + R"("q_lora_rank": null, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0,
      "max_position_embeddings": 8192, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 50000.0,
      "routed_scaling_factor": 2.446)"));
  expect_same_reading(config(R"("architectures": ["Dots1ForCausalLM"], "model_type": "dots1", "attention_bias": false,
      "attention_dropout": 0.0, "first_k_dense_replace": 1, "hidden_act": "silu", "max_position_embeddings": 32768,
      "max_window_layers": 62, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 12, "n_shared_experts": 2,
      "norm_topk_prob": true, "num_experts_per_tok": 3, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": null,
      "rope_theta": 10000000, "routed_scaling_factor": 2.5, "scoring_func": "noaux_tc", "sliding_window": null, "topk_group": 1,
      "topk_method": "noaux_tc", "use_sliding_window": false, "use_cache": true)"));
  for (const char* normed : {"true", "false"})  // GLM-4.5 and GLM-4.5-Air
    expect_same_reading(config(R"("architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "attention_bias": true,
        "eos_token_id": [1, 2], "head_dim": 8, "hidden_act": "silu", "partial_rotary_factor": 0.5, "norm_topk_prob": true,
        "max_position_embeddings": 131072, "num_key_value_heads": 2, "n_group": 1, "topk_group": 1, "n_routed_experts": 12,
        "n_shared_experts": 1, "routed_scaling_factor": 2.5, "num_experts_per_tok": 3, "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1, "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 1000000, "use_qk_norm": )" +
                               std::string(normed)));
  json values = json::parse(config(R"("architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_act": "silu",
      "max_position_embeddings": 32768, "num_experts_per_tok": 2, "num_key_value_heads": 2, "num_local_experts": 5,
      "output_router_logits": false, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
      "sliding_window": null, "tie_word_embeddings": false, "transformers_version": "4.36.0.dev0")"));
  values.erase("moe_intermediate_size");
  expect_same_reading(values.dump());
  expect_same_reading(config(R"("architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "attention_bias": false,
      "decoder_sparse_step": 1, "head_dim": 8, "hidden_act": "silu", "max_position_embeddings": 40960, "max_window_layers": 48,
      "mlp_only_layers": [], "norm_topk_prob": true, "num_experts": 12, "num_experts_per_tok": 3, "num_key_value_heads": 2,
      "output_router_logits": false, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000.0,
      "router_aux_loss_coef": 0.001, "sliding_window": null, "use_cache": true, "use_sliding_window": false)"));
  expect_error([&] { checkpoint::parse_hugging_face_config(config(R"("model_type": "kimi_k2")"), "x"); },
               {"model_type is 'kimi_k2'"});
}

// Each has one number that is not allowed.
TEST(Transformers, a_llama_of_impossible_sizes_is_refused) {
  const auto refused = [](void (*change)(LlamaOptions&), std::initializer_list<std::string> words) {
    LlamaOptions options = small_llama(2, false);
    change(options);
    expect_error([&] { Llama{options}; }, words);
  };
  using O = LlamaOptions;
  refused([](O& o) { o.layers = -1; }, {"sizes must be positive", "layers=-1"});
  refused([](O& o) { o.hidden = 0; }, {"sizes must be positive", "hidden=0"});
  refused([](O& o) { o.heads = 0; }, {"sizes must be positive", "heads=0"});
  refused([](O& o) { o.kv_heads = 0; }, {"sizes must be positive", "kv_heads=0"});
  refused([](O& o) { o.intermediate = 0; }, {"sizes must be positive", "intermediate=0"});
  refused([](O& o) { o.vocab = 0; }, {"sizes must be positive", "vocab=0"});
  refused([](O& o) { o.head_size = -2; }, {"head_size must be even and not below 0", "head_size=-2"});
  refused([](O& o) { o.head_size = 3; }, {"head_size must be even and not below 0", "head_size=3"});
  refused([](O& o) { o.window = -1; }, {"window=-1"});
  refused([](O& o) { o.full_layers = -1; }, {"full_layers=-1"});
  refused([](O& o) { o.document_end = o.vocab; }, {"document_end=", "must be one of the"});
  refused([](O& o) { o.hidden += 1; }, {"must be a multiple of heads", "even quotient"});
  refused([](O& o) { o.hidden = 3 * o.heads; }, {"must be a multiple of heads", "even quotient"});
  refused([](O& o) { o.rope_scaling.factor = 0; }, {"rope_scaling", "factor=0"});
  refused([](O& o) { o.rope_scaling.low_turns = 0; }, {"rope_scaling", "low_turns=0"});
  refused([](O& o) { o.rope_scaling.high_turns = o.rope_scaling.low_turns; }, {"rope_scaling", "low_turns below high_turns"});
  refused([](O& o) { o.rope_scaling.positions = 0; }, {"rope_scaling", "positions=0"});
  refused([](O& o) { o.kv_heads = o.heads - 1; }, {"must be a multiple of kv_heads"});
  refused([](O& o) { o.rotary_size = 6; }, {"rotary_size must be even, and at most the 4 features", "rotary_size=6"});
  refused([](O& o) { o.rotary_size = 3; }, {"rotary_size must be even", "rotary_size=3"});
  refused([](O& o) { o.query_rank = 2; }, {"without a kv_rank there is no LatentAttention", "query_rank=2"});
  refused([](O& o) { o.rope_scaling.yarn = true; }, {"without a kv_rank there is no LatentAttention", "yarn=true"});
  const auto latent = [&](void (*change)(LlamaOptions&), std::initializer_list<std::string> words) {
    LlamaOptions options = small_llama(6, false);
    options.kv_rank = 3;
    options.rotary_size = 2;
    EXPECT_NO_THROW(Llama{options});
    change(options);
    expect_error([&] { Llama{options}; }, words);
  };
  latent([](O& o) { o.kv_heads = 2; }, {"heads=6 and kv_heads=2 must be equal"});
  latent([](O& o) { o.qk_norm = true; }, {"qk_norm=true", "off"});
  latent([](O& o) { o.rotary_size = 0; }, {"rotary_size=4 below the 4 features"});
  latent([](O& o) { o.value_size = 5; }, {"value_size=5 at most as many"});
  latent([](O& o) { o.rope_scaling.yarn = true, o.rope_theta = 1; }, {"with yarn rope_theta must be above 1"});
  LlamaOptions none = small_llama(2, false);
  none.layers = 0;
  EXPECT_NO_THROW(Llama{none});
}

TEST(Transformers, attention_between_queries_and_keys_that_do_not_fit_is_refused) {
  const auto zeros = [](std::vector<int64_t> sizes) { return at::zeros(sizes); };
  const at::Tensor q = zeros({2, 4, 3, 8});
  const std::vector<std::array<at::Tensor, 3>> given = {{q, zeros({2, 0, 3, 8}), zeros({2, 0, 3, 8})},  // no head of keys
                                                        {q, zeros({2, 3, 3, 8}), zeros({2, 3, 3, 8})},
                                                        {q, zeros({2, 2, 3, 8}), zeros({2, 4, 3, 8})},
                                                        {q[0], zeros({2, 2, 3, 8}), zeros({2, 2, 3, 8})},
                                                        {q, zeros({2, 3, 8}), zeros({2, 3, 8})}};
  for (const auto& [queries, keys, values] : given)
    expect_error([&, q = queries, k = keys, v = values] { Attention()->forward(q, k, v); },
                 {"attention", "a divisor of the heads"});
  EXPECT_EQ(Attention()->forward(q, zeros({2, 2, 3, 8}), zeros({2, 2, 3, 8})).sizes(), q.sizes());
}

TEST(Transformers, tokens_that_are_no_batch_of_sequences_are_refused) {
  Llama llama(small_llama(2, false));
  Gpt gpt(GptOptions{.layers = 1, .hidden = 8, .heads = 2, .vocab = kVocab, .positions = 9});
  for (const at::Tensor& wrong : {tokens()[0], tokens().unsqueeze(0)}) {
    expect_error([&] { llama->forward(wrong); }, {"llama", "[batch, length]"});
    expect_error([&] { gpt->forward(wrong); }, {"gpt", "[batch, at most 9 positions]"});
  }
}
