#include "shardproof/checkpoint/format/weight_names.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <charconv>

#include "shardproof/base/check.h"

namespace shardproof::checkpoint {
namespace {

constexpr const char* kGptBase = "transformer.";  // of GPT-2's model below its head
constexpr const char* kLlamaBase = "model.";
// A layer's MLP with experts, in the package's model and in Mixtral's files, which are older.
constexpr const char *kBlock = ".mlp.", *kMixtralBlock = ".block_sparse_moe.";

struct Fusion {
  std::string fused;
  std::vector<std::string> parts;
};

// The last one is GPT-2's.
const std::vector<Fusion>& fusions() {
  static const std::vector<Fusion> table = {{"qkv_proj", {"q_proj", "k_proj", "v_proj"}},
                                            {"gate_up_proj", {"gate_proj", "up_proj"}},
                                            {"c_attn", {"q_proj", "k_proj", "v_proj"}}};
  return table;
}

// "h.0.attn." "c_attn" ".weight"
struct SplitName {
  std::string before, module, leaf;
  explicit SplitName(const std::string& name) {
    const size_t leaf_at = name.rfind('.');
    if (leaf_at == std::string::npos) return;
    const size_t dot = name.rfind('.', leaf_at - 1);
    const size_t module_at = leaf_at == 0 || dot == std::string::npos ? 0 : dot + 1;
    before = name.substr(0, module_at);
    module = name.substr(module_at, leaf_at - module_at);
    leaf = name.substr(leaf_at);
  }
  std::string with(const std::string& other_module) const { return before + other_module + leaf; }
};

std::string replaced(const std::string& name, const std::string& part, const std::string& other) {
  const size_t at = name.find(part);
  return at == std::string::npos ? name : name.substr(0, at) + other + name.substr(at + part.size());
}

// The names that a file of the family may have for the parameter; a file that is written has the first.
std::vector<std::string> names_in_file(const std::string& family, const std::string& parameter) {
  const bool of_head = parameter.starts_with("lm_head.");
  if (family == "gpt2" && !of_head) return {kGptBase + parameter, parameter};
  std::vector<std::string> names = {parameter};
  if (!family.empty() && !of_head && parameter.starts_with(kLlamaBase))
    names.push_back(parameter.substr(std::string(kLlamaBase).size()));
  if (family != "mixtral") return names;
  std::vector<std::string> all;
  for (const std::string& name : names) all.push_back(replaced(name, kBlock, kMixtralBlock));
  all.insert(all.end(), names.begin(), names.end());
  return all;
}

std::optional<std::string> name_in_file(const std::string& family, const std::string& parameter, const WeightShapes& stored) {
  for (const std::string& name : names_in_file(family, parameter))
    if (stored.contains(name)) return name;
  return std::nullopt;
}

// Back, from either name.
std::string parameter_of(const std::string& family, const std::string& stored) {
  const std::string base = family == "gpt2" ? kGptBase : kLlamaBase;
  const bool has_base = stored.starts_with(base);
  if (family == "gpt2") return has_base ? stored.substr(base.size()) : stored;
  const std::string name = has_base || stored.starts_with("lm_head.") ? stored : base + stored;
  return family == "mixtral" ? replaced(name, kMixtralBlock, kBlock) : name;
}

// A Conv1D of the package.
bool is_turned(const std::string& family, const std::string& parameter) {
  if (family != "gpt2" || !parameter.starts_with("h.")) return false;
  const std::vector<std::string> projections = {".attn.c_attn.weight", ".attn.c_proj.weight", ".mlp.c_fc.weight",
                                                ".mlp.c_proj.weight"};
  return std::any_of(projections.begin(), projections.end(), [&](const auto& end) { return parameter.ends_with(end); });
}

// The rows of a parameter in the fused tensor of the file that has them.
std::optional<WeightRecipe> part_of_fused(const std::string& family, const std::string& parameter, const Fusion& fusion,
                                          const WeightShapes& parameters, const WeightShapes& stored) {
  const SplitName name(parameter);
  const auto own = std::find(fusion.parts.begin(), fusion.parts.end(), name.module);
  const std::string fused = name.with(fusion.fused);
  const auto found = name_in_file(family, fused, stored);
  if (own == fusion.parts.end() || !found) return std::nullopt;
  int64_t rows = 0;
  Interval mine;
  for (auto part = fusion.parts.begin(); part != fusion.parts.end(); ++part) {
    const auto shape = parameters.find(name.with(*part));
    if (shape == parameters.end() || shape->second.empty()) return std::nullopt;
    if (part == own) mine = {rows, rows + shape->second[0]};
    rows += shape->second[0];
  }
  const Shape& shape = stored.at(*found);
  const bool turned = is_turned(family, fused);
  const size_t dim = turned && shape.size() == 2 ? 1 : 0;
  SHARD_REQUIRE(!shape.empty() && shape[dim] == rows, "checkpoint",
                "{} should have the {} rows of {} one after the other, and has the shape [{}]", *found, rows,
                fmt::join(fusion.parts, ", "), fmt::join(shape, ", "));
  return WeightRecipe{{{*found, mine}}, turned};
}

// A fused parameter out of separate tensors of the file.
std::optional<WeightRecipe> whole_of_parts(const std::string& family, const std::string& parameter, const Fusion& fusion,
                                           const WeightShapes& stored) {
  const SplitName name(parameter);
  if (name.module != fusion.fused) return std::nullopt;
  WeightRecipe recipe;
  for (const std::string& part : fusion.parts) {
    const auto found = name_in_file(family, name.with(part), stored);
    if (!found) return std::nullopt;
    recipe.parts.push_back({*found});
  }
  return recipe;
}

// What the family's files call the matrices whose rows follow each other in an expert's matrix; none: the parameter is no stack
// of experts.
std::vector<std::string> projections_of_expert(const std::string& family, const std::string& parameter, const Shape& shape) {
  using Names = std::vector<std::string>;
  if (shape.size() != 3) return {};
  if (parameter.ends_with("experts.gate_up_proj"))
    return family == "mixtral" ? Names{"w1", "w3"} : Names{"gate_proj", "up_proj"};
  if (parameter.ends_with("experts.down_proj")) return family == "mixtral" ? Names{"w2"} : Names{"down_proj"};
  return {};
}

std::string name_of_expert(const std::string& parameter, int64_t expert, const std::string& projection) {
  return fmt::format("{}.{}.{}.weight", parameter.substr(0, parameter.rfind('.')), expert, projection);
}

// A stack of experts whose matrices are tensors of their own in the file.
std::optional<WeightRecipe> stack_of_experts(const std::string& family, const std::string& parameter,
                                             const WeightShapes& parameters, const WeightShapes& stored) {
  const auto shape = parameters.find(parameter);
  if (shape == parameters.end()) return std::nullopt;
  const auto projections = projections_of_expert(family, parameter, shape->second);
  if (projections.empty()) return std::nullopt;
  WeightRecipe recipe{.parts = {}, .turned = false, .matrices = shape->second[0]};
  std::vector<std::string> missing;
  for (int64_t expert = 0; expert < recipe.matrices; ++expert)
    for (const std::string& projection : projections) {
      const std::string name = name_of_expert(parameter, expert, projection);
      if (const auto found = name_in_file(family, name, stored))
        recipe.parts.push_back({*found});
      else
        missing.push_back(names_in_file(family, name)[0]);
    }
  if (recipe.parts.empty()) return std::nullopt;
  SHARD_REQUIRE(missing.empty(), "checkpoint", "the file has some of the {} experts of {}, and lacks {}{}", recipe.matrices,
                parameter, missing[0], missing.size() > 1 ? fmt::format(" and {} more", missing.size() - 1) : "");
  return recipe;
}

// The matrices of a stack of experts, each a tensor of its own; whether it is one.
bool unstack(const std::string& family, const std::string& parameter, const Shape& shape,
             std::map<std::string, WeightRecipe>& recipes) {
  const auto projections = projections_of_expert(family, parameter, shape);
  if (projections.empty()) return false;
  const auto count = static_cast<int64_t>(projections.size());
  SHARD_REQUIRE(shape[1] % count == 0, "checkpoint", "{} of shape [{}] should have as many rows of {}", parameter,
                fmt::join(shape, ", "), fmt::join(projections, " as of "));
  const int64_t rows = shape[1] / count;
  for (int64_t expert = 0; expert < shape[0]; ++expert)
    for (int64_t i = 0; i < count; ++i)
      recipes[names_in_file(family, name_of_expert(parameter, expert, projections[static_cast<size_t>(i)]))[0]] = {
          {{parameter, Interval{i * rows, (i + 1) * rows}, expert}}};
  return true;
}

// A fused parameter in equal parts.
void separate(const std::string& family, const std::string& parameter, const Fusion& fusion, const Shape& shape,
              std::map<std::string, WeightRecipe>& recipes) {
  const SplitName name(parameter);
  const auto parts = static_cast<int64_t>(fusion.parts.size());
  SHARD_REQUIRE(fusion.fused != "qkv_proj" && !shape.empty() && shape[0] % parts == 0, "checkpoint",
                "{} of shape [{}] cannot be separated into {}: how many rows are whose is not known", parameter,
                fmt::join(shape, ", "), fmt::join(fusion.parts, ", "));
  const int64_t rows = shape[0] / parts;
  for (int64_t i = 0; i < parts; ++i)
    recipes[names_in_file(family, name.with(fusion.parts[static_cast<size_t>(i)]))[0]] = {
        {{parameter, Interval{i * rows, (i + 1) * rows}}}};
}

// The tensor that has this parameter and its siblings, when this is the first of them; whether this is one of them.
bool fuse(const std::string& family, const std::string& parameter, const Fusion& fusion, const WeightShapes& parameters,
          std::map<std::string, WeightRecipe>& recipes) {
  const SplitName name(parameter);
  const auto has = [&](const std::string& part) { return parameters.contains(name.with(part)); };
  if (std::find(fusion.parts.begin(), fusion.parts.end(), name.module) == fusion.parts.end()) return false;
  if (!std::all_of(fusion.parts.begin(), fusion.parts.end(), has)) return false;
  if (name.module != fusion.parts[0]) return true;
  WeightRecipe recipe;
  for (const std::string& part : fusion.parts) recipe.parts.push_back({name.with(part)});
  recipes[names_in_file(family, name.with(fusion.fused))[0]] = std::move(recipe);
  return true;
}

}  // namespace

Shape WeightPart::shape(Shape of_tensor) const {
  if (matrix) of_tensor.erase(of_tensor.begin());
  if (rows) of_tensor.at(0) = rows->size();
  return of_tensor;
}

const std::vector<std::string>& weight_families() {
  static const std::vector<std::string> families = {"gpt2",  "llama",     "mistral", "mixtral",  "qwen2",
                                                    "qwen3", "qwen3_moe", "dots1",   "glm4_moe", "deepseek_v3"};
  return families;
}

void require_family(const std::string& family) {
  const auto& known = weight_families();
  SHARD_REQUIRE(std::find(known.begin(), known.end(), family) != known.end(), "checkpoint",
                "there are no models of the family '{}'; known are {}", family, fmt::join(known, ", "));
}

std::optional<WeightRecipe> parameter_recipe(const std::string& family, const std::string& parameter,
                                             const WeightShapes& parameters, const WeightShapes& stored) {
  if (!family.empty()) require_family(family);
  if (const auto name = name_in_file(family, parameter, stored)) return WeightRecipe{{{*name}}, is_turned(family, parameter)};
  for (const Fusion& fusion : fusions()) {
    if (auto recipe = part_of_fused(family, parameter, fusion, parameters, stored)) return recipe;
    if (auto recipe = whole_of_parts(family, parameter, fusion, stored)) return recipe;
  }
  return stack_of_experts(family, parameter, parameters, stored);
}

std::map<std::string, WeightRecipe> file_recipes(const std::string& family, const WeightShapes& parameters,
                                                 Projections projections) {
  if (!family.empty()) require_family(family);
  std::map<std::string, WeightRecipe> recipes;
  for (const auto& [parameter, shape] : parameters) {
    bool done = !family.empty() && projections != Projections::fused && unstack(family, parameter, shape, recipes);
    for (const Fusion& fusion : fusions()) {
      if (projections == Projections::separate && SplitName(parameter).module == fusion.fused) {
        separate(family, parameter, fusion, shape, recipes);
        done = true;
      }
      // Of the two that q_proj is a part of, the first is the one for models that have it.
      if (projections == Projections::fused && !done) done = fuse(family, parameter, fusion, parameters, recipes);
    }
    if (!done) recipes[names_in_file(family, parameter)[0]] = {{{parameter}}, is_turned(family, parameter)};
  }
  return recipes;
}

namespace {

// The number in "model.layers.7.x"; nothing: it lies in no layer.
std::optional<int64_t> layer_of(const std::string& name) {
  const std::string layers = "model.layers.";
  int64_t layer = 0;
  if (!name.starts_with(layers)) return std::nullopt;
  const auto [end, error] = std::from_chars(name.data() + layers.size(), name.data() + name.size(), layer);
  return error == std::errc() && *end == '.' ? std::optional(layer) : std::nullopt;
}

}  // namespace

bool has_drafts(const std::string& family) {
  return family == "glm4_moe" || family == "deepseek_v3";
}

bool is_no_weight(const std::string& family, const std::string& stored, const WeightShapes& parameters, int64_t drafts) {
  const auto has = [&](int64_t layer) {
    const std::string name = fmt::format("model.layers.{}.", layer);
    const auto first = parameters.lower_bound(name);
    return first != parameters.end() && first->first.starts_with(name);
  };
  if (const auto layer = layer_of(parameter_of(family, stored)); drafts > 0 && layer)
    if (!has(*layer) && has(std::max<int64_t>(0, *layer - drafts))) return true;
  if (family == "gpt2") return stored.ends_with(".attn.bias") || stored.ends_with(".attn.masked_bias");
  return stored.ends_with(".rotary_emb.inv_freq");
}

bool is_router_bias(const std::string& name) {
  return name.ends_with(".e_score_correction_bias");
}

std::map<std::string, WeightRecipe> renamed_parameters(const std::string& family, const WeightShapes& stored) {
  require_family(family);
  std::map<std::string, WeightRecipe> recipes;
  for (const auto& [name, shape] : stored) {
    if (is_no_weight(family, name, {})) continue;
    const std::string experts = ".experts.";
    const size_t at = name.find(experts);
    SHARD_REQUIRE(at == name.npos || name.find_first_of("0123456789", at) != at + experts.size(), "checkpoint",
                  "{} is a part of an expert, and the config.json beside it, which tells how many there are, is missing", name);
    const std::string parameter = parameter_of(family, name);
    SHARD_REQUIRE(!recipes.contains(parameter), "checkpoint", "two tensors would be called {}", parameter);
    recipes[parameter] = {{{name}}, is_turned(family, parameter)};
  }
  return recipes;
}

}  // namespace shardproof::checkpoint
