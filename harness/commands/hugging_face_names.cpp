#include "harness/commands/hugging_face_names.h"

#include <algorithm>

#include "shardproof/base/check.h"

namespace harness {
namespace {

constexpr const char* kBase = "transformer.";  // of GPT-2's model below its head
constexpr const char* kKey = "model.";         // of parameters in DCP checkpoints

bool is_gpt2(const std::string& family) {
  const auto& known = hugging_face_families();
  SHARD_REQUIRE(std::find(known.begin(), known.end(), family) != known.end(), "checkpoint",
                "there are no models of the family '{}'; known are {}", family, fmt::join(known, ", "));
  return family == "gpt2";
}

std::string without(const std::string& prefix, const std::string& name) {
  return name.starts_with(prefix) ? name.substr(prefix.size()) : name;
}

// A Conv1D in the package.
bool is_turned(const std::string& parameter) {
  for (const char* projection : {".attn.c_attn.weight", ".attn.c_proj.weight", ".mlp.c_fc.weight", ".mlp.c_proj.weight"})
    if (parameter.starts_with("h.") && parameter.ends_with(projection)) return true;
  return false;
}

bool is_mask(const std::string& parameter) {
  return parameter.ends_with(".attn.bias") || parameter.ends_with(".attn.masked_bias");
}

}  // namespace

const std::vector<std::string>& hugging_face_families() {
  static const std::vector<std::string> families = {"gpt2", "llama"};
  return families;
}

std::optional<OtherName> from_hugging_face(const std::string& family, const std::string& name) {
  if (!is_gpt2(family)) return name.ends_with(".rotary_emb.inv_freq") ? std::nullopt : std::optional(OtherName{kKey + name});
  const std::string parameter = without(kBase, name);
  if (is_mask(parameter)) return std::nullopt;
  return OtherName{kKey + parameter, is_turned(parameter)};
}

std::optional<OtherName> to_hugging_face(const std::string& family, const std::string& key) {
  const bool gpt2 = is_gpt2(family);
  if (!key.starts_with(kKey)) return std::nullopt;
  const std::string parameter = without(kKey, key);
  if (!gpt2) return OtherName{parameter};
  return OtherName{parameter.starts_with("lm_head.") ? parameter : kBase + parameter, is_turned(parameter)};
}

}  // namespace harness
