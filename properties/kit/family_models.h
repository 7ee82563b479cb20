// Small models of the families whose files the library reads, as properties draw them.
#pragma once

#include <rapidcheck.h>

#include <map>
#include <memory>
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

// Of a model without a mesh, each name of a tied parameter.
inline Values values_of(const HuggingFaceModel& model, uint64_t seed) {
  const auto module = made(model);
  initialize_parameters(*module, uniform_initializer(seed, 0.5));
  Values values;
  for (const auto& item : module->named_parameters()) values[item.key()] = item.value().detach().clone();
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
  if (family != "qwen3_moe") return;
  options.router.normalized = *rc::gen::arbitrary<bool>();
  options.dense_layers = drawn(0, options.layers - 1);
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
                       .qk_norm = model.family.starts_with("qwen3"),
                       .qkv_bias = model.family == "qwen2",
                       .head_size = own_size ? 10 : 0};
  if (model.family == "mixtral" || model.family == "qwen3_moe") draw_experts(model.family, options);
  model.options = options;
  return model;
}

}  // namespace shardproof::family_models
