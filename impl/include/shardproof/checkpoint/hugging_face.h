// The configuration of a model of Hugging Face's transformers package (config.json), to the library's models and back.
//
//   const HuggingFaceModel described = read_hugging_face_config("Qwen2.5-0.5B");
//   Llama model(std::get<LlamaOptions>(described.options));
//
// weights.h reads and writes the weights beside it.
#pragma once

#include <cstdint>
#include <string>
#include <variant>

#include "shardproof/base/dtypes.h"
#include "shardproof/checkpoint/format/file_system.h"
#include "shardproof/models/models.h"

namespace shardproof::checkpoint {

struct HuggingFaceModel {
  std::string family;  // gpt2, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, dots1, glm4_moe or deepseek_v3
  std::variant<GptOptions, LlamaOptions> options;
  int64_t positions = 0;  // max_position_embeddings: the longest sequence that it was made for
  // The text of the config.json that it was read from, which says more than the fields above: the tokens that begin and end a
  // text, whatever the package keeps there. It is written again, with what was changed in the fields since. "":
  // there is none, and those tokens are written as null.
  std::string source = "";
  std::string generation = "";  // the text of the generation_config.json beside it; "": there is none
};

// Reads a config.json, or that of a folder. What is absent has the value that the package takes. Dropout is not read: set it in
// the options. Nor is router_aux_loss_coef, since the package's loss for balance is another than the library's (see
// RouterOptions::balance_loss). Throws Error, which names the file and what it asks for, when the library's models cannot
// compute it: another family, biases where they have none, scaled rotary positions, other activations, windows in other layers
// than the last ones, or an entry that is not known and not off.
HuggingFaceModel read_hugging_face_config(const std::string& path, FileSystem& files = system_files());
// The same of its text. `path` is for messages.
HuggingFaceModel parse_hugging_face_config(const std::string& text, const std::string& path);

// The text of a config.json with which the package computes what the library's model does. `dtype` is that of the weights
// beside it. Throws Error when the family has no such model, such as a llama with qkv_bias.
std::string hugging_face_config(const HuggingFaceModel& model, Dtype dtype = Dtype::Float);

}  // namespace shardproof::checkpoint
