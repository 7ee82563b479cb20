#include "harness/plan/hugging_face_config.h"

#include "shardproof/checkpoint/hugging_face.h"

namespace harness {
namespace {

using namespace shardproof;

golden::Model model_of(const GptOptions& options) {
  golden::Model model;
  model.kind = golden::Model::Kind::gpt;
  model.gpt = {.layers = options.layers,
               .hidden = options.hidden,
               .heads = options.heads,
               .vocab = options.vocab,
               .positions = options.positions,
               .tied = options.tied};
  return model;
}

golden::Model model_of(const LlamaOptions& options, int64_t positions) {
  golden::Model model;
  model.kind = golden::Model::Kind::llama;
  model.llama = {.layers = options.layers,
                 .hidden = options.hidden,
                 .heads = options.heads,
                 .kv_heads = options.kv_heads,
                 .intermediate = options.intermediate,
                 .vocab = options.vocab,
                 .positions = positions,
                 .tied = options.tied,
                 .qk_norm = options.qk_norm,
                 .qkv_bias = options.qkv_bias,
                 .head_size = options.head_size};
  return model;
}

}  // namespace

golden::Model model_of_config(const std::string& path) {
  const checkpoint::HuggingFaceModel described = checkpoint::read_hugging_face_config(path);
  if (const auto* gpt = std::get_if<GptOptions>(&described.options)) return model_of(*gpt);
  return model_of(std::get<LlamaOptions>(described.options), described.positions);
}

}  // namespace harness
