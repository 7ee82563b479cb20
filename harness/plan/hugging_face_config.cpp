#include "harness/plan/hugging_face_config.h"

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "shardproof/base/check.h"

namespace harness {
namespace {

using nlohmann::json;

// What is absent or null has the value that the package takes.
template <class Value>
Value value_or(const json& config, const char* name, Value otherwise) {
  const auto found = config.find(name);
  return found == config.end() || found->is_null() ? otherwise : found->get<Value>();
}

void require(bool holds, const std::string& path, const std::string& what) {
  SHARD_REQUIRE(holds, "plan", "{}: {}. Write the model as in a case instead, e.g. --model 'llama(layers=2,hidden=64,...)'",
                path, what);
}

golden::Model gpt2(const json& config, const std::string& path) {
  golden::Model model;
  model.kind = golden::Model::Kind::gpt;
  golden::Gpt& gpt = model.gpt;
  gpt.layers = config.at("n_layer");
  gpt.hidden = config.at("n_embd");
  gpt.heads = config.at("n_head");
  gpt.vocab = config.at("vocab_size");
  gpt.positions = value_or<int64_t>(config, "n_positions", 1024);
  gpt.tied = value_or(config, "tie_word_embeddings", true);
  const int64_t inner = value_or<int64_t>(config, "n_inner", 4 * gpt.hidden);
  require(inner == 4 * gpt.hidden, path,
          fmt::format("the MLP is {} wide, and a gpt's is four times {}, the hidden size", inner, gpt.hidden));
  return model;
}

golden::Model llama(const json& config, const std::string& path, bool qk_norm) {
  golden::Model model;
  model.kind = golden::Model::Kind::llama;
  golden::Llama& llama = model.llama;
  llama.layers = config.at("num_hidden_layers");
  llama.hidden = config.at("hidden_size");
  llama.heads = config.at("num_attention_heads");
  llama.kv_heads = value_or(config, "num_key_value_heads", llama.heads);
  llama.intermediate = config.at("intermediate_size");
  llama.vocab = config.at("vocab_size");
  llama.positions = value_or<int64_t>(config, "max_position_embeddings", 2048);
  llama.tied = value_or(config, "tie_word_embeddings", false);
  llama.qk_norm = qk_norm;
  require(!value_or(config, "attention_bias", false) && !value_or(config, "mlp_bias", false), path,
          "the projections have biases, and a llama's have none");
  require(llama.heads > 0, path, fmt::format("num_attention_heads is {}", llama.heads));
  const int64_t head = value_or<int64_t>(config, "head_dim", llama.hidden / llama.heads);
  require(
      head * llama.heads == llama.hidden, path,
      fmt::format("{} heads of {} features are not the hidden size, {}, as a llama's are", llama.heads, head, llama.hidden));
  return model;
}

}  // namespace

golden::Model model_of_config(const std::string& path) {
  std::ifstream file(path);
  SHARD_REQUIRE(file.good(), "plan", "cannot read the model's configuration {}", path);
  try {
    const json config = json::parse(file);
    const auto family = value_or<std::string>(config, "model_type", "");
    if (family == "gpt2") return gpt2(config, path);
    require(std::set<std::string>{"llama", "mistral", "qwen3"}.contains(family), path,
            fmt::format("its model_type is '{}'; known are gpt2, llama, mistral and qwen3", family));
    return llama(config, path, family == "qwen3");
  } catch (const json::exception& error) {
    throw shardproof::Error(shardproof::message("[plan] {} is no config.json of a model: {}", path, error.what()));
  }
}

}  // namespace harness
