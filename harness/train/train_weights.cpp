#include "harness/train/train_weights.h"

#include <ATen/ATen.h>

#include <filesystem>
#include <set>
#include <sstream>

#include "harness/case/case.h"
#include "harness/case/model_fields.h"
#include "harness/case/network.h"
#include "shardproof/base/check.h"
#include "shardproof/checkpoint/hugging_face.h"
#include "shardproof/checkpoint/weights.h"

namespace harness {
namespace {

constexpr int64_t kBytes = 256;  // of which text consists

// The keys that stand in "gpt(layers=2,tied)".
std::set<std::string> keys_in(const std::string& text) {
  const size_t begin = text.find('(') + 1;
  std::istringstream inside(text.substr(begin, text.rfind(')') - begin));
  std::set<std::string> keys;
  for (std::string argument; std::getline(inside, argument, ',');) {
    std::string key = argument.substr(0, argument.find('='));
    std::erase(key, ' ');
    keys.insert(key);
  }
  return keys;
}

}  // namespace

golden::Model model_of_weights(const std::string& folder) {
  const bool is_file = std::filesystem::is_regular_file(folder);
  SHARD_REQUIRE(std::filesystem::is_directory(folder), "weights",
                "--weights {}: {}. Give one with config.json and model*.safetensors, as a clone of a model of Hugging Face is",
                folder, is_file ? "this is a file, and no folder" : "there is no such folder");
  SHARD_REQUIRE(
      std::filesystem::exists(folder + "/config.json"), "weights",
      "--weights {}: this folder has no config.json, so it is not that of a Hugging Face model. A checkpoint of train "
      "becomes one by: shardproof checkpoint convert CHECKPOINT FOLDER --to safetensors --family FAMILY. To go on from "
      "a checkpoint, give --checkpoint-dir and --resume",
      folder);
  const golden::Model model = described_model(shardproof::checkpoint::read_hugging_face_config(folder));
  validate(model);
  return model;
}

golden::Model with_busy_experts(golden::Model model, const std::string& text) {
  const golden::Llama given = parse_model(text).llama;
  SHARD_REQUIRE(given.expert_lean == 0, "train",
                "--model has expert_lean={}, and routers have the biases of --weights. Leave out expert_lean",
                given.expert_lean);
  golden::Llama& m = model.llama;
  std::tie(m.expert_balance, m.balance_over, m.expert_z, m.expert_capacity) =
      std::tie(given.expert_balance, given.balance_over, given.expert_z, given.expert_capacity);
  if (m.has_bias()) m.expert_bias = given.expert_bias;
  return model;
}

void require_same_model(const std::string& text, const golden::Model& model, const std::string& source) {
  const golden::Model given = parse_model(text);
  SHARD_REQUIRE(given.kind == model.kind, "train", "--model is a {}, and {} is of a {}. Leave out --model",
                to_string(given.kind), source, to_string(model.kind));
  const std::set<std::string> keys = keys_in(text);
  for (const ModelField& field : model_fields(model.kind)) {
    const std::string said = field.text(given), there = field.text(model);
    SHARD_REQUIRE(said == there || !keys.contains(field.key), "train",
                  "--model has {}, and {} has {}. Leave out --model, which is known from there",
                  said.empty() ? fmt::format("the usual {}", field.key) : said, source,
                  there.empty() ? fmt::format("the usual {}", field.key) : there);
  }
}

void require_bytes(const golden::Model& model, const std::string& folder, const char* where, const char* to_do) {
  if (model.vocab() <= kBytes) return;
  const std::string tokenizer = folder + "/tokenizer.json";
  const bool has_tokenizer = std::filesystem::exists(tokenizer);
  throw shardproof::Error(fmt::format(
      "[{}] the weights in {} are of a model of {} tokens, and text has bytes. {}, which {} (docs/howto/weights.md)", where,
      folder, model.vocab(), to_do,
      has_tokenizer ? fmt::format("{} makes of text", tokenizer)
                    : fmt::format("the tokenizer makes of text that the model was trained with; there is no {}", tokenizer)));
}

void load_weights_of(const std::string& folder, shardproof::Sharded& sharded) {
  shardproof::checkpoint::load_weights(folder, sharded,
                                       {.family = shardproof::checkpoint::read_hugging_face_config(folder).family});
}

void fill_shards_later(shardproof::ShardOptions& options, c10::Device device) {
  options.device = device;
  options.initialize = [](const std::string&, const shardproof::Shape&, shardproof::Interval, at::Tensor values) {
    values.zero_();
  };
  options.broadcast_initial_values = false;
}

}  // namespace harness
