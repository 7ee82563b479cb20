// Small models of the families whose files the library reads, as properties draw them.
#pragma once

#include <rapidcheck.h>

#include <map>
#include <memory>
#include <set>
#include <string>
#include <variant>

#include "shardproof/checkpoint/format/weight_names.h"
#include "shardproof/checkpoint/hugging_face.h"
#include "shardproof/shardproof.h"

namespace shardproof::family_models {

using checkpoint::HuggingFaceModel;
using Values = std::map<std::string, at::Tensor>;

inline bool is_gpt(const HuggingFaceModel& model) {
  return model.family == "gpt2";
}
inline const LlamaOptions& llama_of(const HuggingFaceModel& model) {
  return std::get<LlamaOptions>(model.options);
}
inline bool has_experts(const HuggingFaceModel& model) {
  return !is_gpt(model) && llama_of(model).router.experts > 0;
}

inline std::shared_ptr<torch::nn::Module> made(const HuggingFaceModel& model) {
  if (is_gpt(model)) return Gpt(std::get<GptOptions>(model.options)).ptr();
  return Llama(llama_of(model)).ptr();
}

inline bool is_tied(const HuggingFaceModel& model) {
  return std::visit([](const auto& options) { return options.tied; }, model.options);
}

// Of a model without a mesh, each name of a tied parameter, and the biases of routers.
inline Values values_of(const HuggingFaceModel& model, uint64_t seed) {
  const auto module = made(model);
  initialize_parameters(*module, uniform_initializer(seed, 0.5));
  Values values;
  for (const auto& list : {module->named_parameters(), module->named_buffers()})
    for (const auto& item : list) values[item.key()] = item.value().detach().clone();
  return values;
}

inline int64_t drawn(int64_t first, int64_t last) {
  return *rc::gen::inRange<int64_t>(first, last + 1);
}

// More than ten, whose numbers have an order of their own as texts, or so few that ranks have none.
inline void draw_experts(const std::string& family, LlamaOptions& options) {
  const int64_t experts = *rc::gen::elementOf(std::vector<int64_t>{1, 3, 12});
  options.router = {.experts = experts, .experts_per_token = drawn(1, std::min<int64_t>(experts, 3))};
  options.expert_intermediate = drawn(1, 4);
  if (family == "mixtral") return;
  options.router.normalized = *rc::gen::arbitrary<bool>();
  options.dense_layers = drawn(0, options.layers - 1);
}

// What the families with the router of DeepSeek-V3 have, and each of them alone.
inline void draw_router_biases(const std::string& family, LlamaOptions& options) {
  draw_experts(family, options);
  options.shared_intermediate = drawn(1, 2) * options.expert_intermediate;
  RouterOptions& router = options.router;
  router.score = RouterScore::sigmoid;
  router.bias = true;
  router.scale = *rc::gen::elementOf(std::vector<double>{1, 2.5});
  router.experts = std::max<int64_t>(2, router.experts);
  if (router.experts == 12) router.groups = 4, router.groups_per_token = drawn(1, 4);
  if (family == "glm4_moe") {
    options.qk_norm = *rc::gen::arbitrary<bool>();
    options.qkv_bias = *rc::gen::arbitrary<bool>();
    options.rotary_size = options.features_of_head() > 2 ? 2 : 0;
  }
  if (family != "deepseek_v3") return;
  options.kv_heads = options.heads;
  options.kv_rank = drawn(1, 5);
  options.query_rank = drawn(0, 5);
  options.head_size = 8;
  options.rotary_size = 2 * drawn(1, 3);
  options.value_size = drawn(1, 8);
  options.rope_interleaved = *rc::gen::arbitrary<bool>();
}

// Small, of any of the families, and, without experts, of any tp up to 2.
inline HuggingFaceModel drawn_model() {
  HuggingFaceModel model{*rc::gen::elementOf(checkpoint::weight_families()), {}, 16};
  const bool tied = *rc::gen::arbitrary<bool>();
  if (model.family == "gpt2") {
    const int64_t heads = drawn(2, 3);
    model.options = GptOptions{.layers = drawn(1, 2),
                               .hidden = heads * drawn(1, 3),
                               .heads = heads,
                               .vocab = drawn(3, 9),
                               .positions = 16,
                               .tied = tied,
                               .tanh_gelu = *rc::gen::arbitrary<bool>()};
    return model;
  }
  const int64_t kv_heads = drawn(1, 2), heads = 2 * kv_heads;
  const bool own_size = model.family != "qwen2" && *rc::gen::arbitrary<bool>();
  LlamaOptions options{.layers = drawn(1, 2),
                       .hidden = heads * 2 * drawn(1, 2),
                       .heads = heads,
                       .kv_heads = kv_heads,
                       .intermediate = drawn(2, 7),
                       .vocab = drawn(3, 9),
                       .rope_theta = *rc::gen::elementOf(std::vector<double>{10000, 1e6}),
                       .norm_eps = 1e-6,
                       .tied = tied,
                       .qk_norm = model.family.starts_with("qwen3") || model.family == "dots1",
                       .qkv_bias = model.family == "qwen2",
                       .head_size = own_size ? 10 : 0};
  if (model.family == "mixtral" || model.family == "qwen3_moe") draw_experts(model.family, options);
  const std::set<std::string> biased = {"dots1", "glm4_moe", "deepseek_v3"};
  if (biased.contains(model.family)) draw_router_biases(model.family, options);
  model.options = options;
  return model;
}

}  // namespace shardproof::family_models
