#include "harness/case/case.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "harness/case/axes.h"
#include "harness/case/model_fields.h"
#include "harness/case/random.h"
#include "shardproof/algebra/strategy.h"
#include "shardproof/base/check.h"
#include "shardproof/comm/threads/threads.h"

namespace harness {
namespace {

// "name(a=1,b)" of those arguments that are not at their defaults.
class Group {
 public:
  explicit Group(std::string name) : name_(std::move(name)) {}
  // A whole argument, or nothing.
  Group& add(std::string argument) {
    if (!argument.empty()) arguments_.push_back(std::move(argument));
    return *this;
  }
  template <class T>
  Group& add(const std::string& key, const T& value) {
    arguments_.push_back(fmt::format("{}={}", key, value));
    return *this;
  }
  template <class T>
  Group& add(const std::string& key, const T& value, const T& standard) {
    return value == standard ? *this : add(key, value);
  }
  Group& flag(const char* key, bool value, bool standard) {
    if (value != standard) arguments_.push_back(value ? key : fmt::format("{}=0", key));
    return *this;
  }
  std::string str() const {
    return arguments_.empty() ? name_ : fmt::format("{}({})", name_, fmt::join(arguments_, ","));
  }

 private:
  std::string name_;
  std::vector<std::string> arguments_;
};

std::string strategy_str(const Case& c) {
  const CaseOptions standard;
  Group group(c.strategy);
  for (const OptionRow& row : option_rows())
    group.add(row.key, value_text(row, row.of(c.options)), value_text(row, row.of(standard)));
  return group.str();
}

std::string optimizer_str(const Case& c) {
  const golden::Optimizer& o = c.optimizer;
  const golden::Optimizer standard;
  Group group(to_string(o.kind));
  group.add("lr", o.lr);
  if (o.kind == golden::Optimizer::Kind::sgd || o.kind == golden::Optimizer::Kind::muon)
    group.add("momentum", o.momentum, standard.momentum);
  if (o.kind == golden::Optimizer::Kind::sgd) group.flag("nesterov", o.nesterov, standard.nesterov);
  else group.add("beta1", o.beta1, standard.beta1).add("beta2", o.beta2, standard.beta2).add("eps", o.eps, standard.eps);
  return group.add("decay", o.weight_decay, standard.weight_decay)
      .add("groups", c.groups, int64_t{0})
      .add("clip", c.clip_norm, 0.0)
      .add("norm", std::string(c.norm_order == 0 ? "inf" : std::to_string(c.norm_order)), std::string("2"))
      .str();
}

std::string history_str(const std::vector<StepPlan>& steps) {
  std::string text;
  StepPlan current;
  const auto set = [&](const char* word, int64_t StepPlan::* member, int64_t value) {
    if (current.*member != value) text += fmt::format(" {}({})", word, value);
    current.*member = value;
  };
  for (size_t i = 0; i < steps.size();) {
    size_t end = i + 1;
    const StepPlan& step = steps[i];
    const bool repeats = !step.eval && !step.discard && !step.unshard && !step.save && !step.crash && !step.loads();
    while (repeats && end < steps.size() && steps[end] == step) ++end;
    set("accumulate", &StepPlan::rounds, step.rounds);
    set("sync", &StepPlan::sync_every, step.sync_every);
    set("freeze", &StepPlan::frozen, step.frozen);
    set("lr", &StepPlan::lr_percent, step.lr_percent);
    if (step.save) text += " save";
    if (step.crash) text += " crash-during-save";
    if (step.load_mesh) text += fmt::format(" load@mesh({})", step.load_mesh->str());
    if (!step.load_strategy.empty()) text += fmt::format(" load@strategy({})", step.load_strategy);
    if (step.eval) text += " eval";
    if (step.discard) text += " discard";
    if (step.unshard) text += " unshard";
    text += end - i == 1 ? " step" : fmt::format(" step*{}", end - i);
    i = end;
  }
  return text;
}

}  // namespace

std::string str(const golden::Model& model) {
  Group group(to_string(model.kind));
  for (const ModelField& field : model_fields(model.kind)) group.add(field.text(model));
  return group.str();
}

const char* to_string(Mode mode) {
  switch (mode) {
    case Mode::exact: return "exact";
    case Mode::ordered: return "ordered";
    case Mode::canonical: return "canonical";
    case Mode::fast: return "fast";
  }
  return "?";
}

const std::vector<Mode>& modes() {
  static const std::vector<Mode> all = {Mode::exact, Mode::ordered, Mode::canonical, Mode::fast};
  return all;
}

const char* to_string(golden::Optimizer::Kind kind) {
  using Kind = golden::Optimizer::Kind;
  switch (kind) {
    case Kind::sgd: return "sgd";
    case Kind::adam: return "adam";
    case Kind::adamw: return "adamw";
    case Kind::lion: return "lion";
    case Kind::muon: return "muon";
  }
  return "?";
}

const std::vector<golden::Optimizer::Kind>& optimizer_kinds() {
  using enum golden::Optimizer::Kind;
  static const std::vector<golden::Optimizer::Kind> all = {sgd, adam, adamw, lion, muon};
  return all;
}

const char* to_string(golden::Model::Kind kind) {
  using Kind = golden::Model::Kind;
  switch (kind) {
    case Kind::mlp: return "mlp";
    case Kind::gpt: return "gpt";
    case Kind::conv: return "conv";
    case Kind::odd: return "odd";
    case Kind::llama:
      return "llama";
  }
  return "?";
}

namespace {

// Names of the modules that can have adapters.
std::vector<std::string> linear_layers(const golden::Model& model) {
  std::vector<std::string> names;
  for (const auto& [name, shape] : golden::parameter_shapes(model)) {
    const std::string module = name.substr(0, name.rfind('.'));
    const bool embeds = module == "wte" || module == "wpe" || module == "model.embed_tokens";
    if (shape.size() == 2 && !embeds) names.push_back(module);
  }
  return names;
}

// One group for each parameter that is not decayed.
std::vector<golden::Optimizer::Group> undecayed(const golden::Model& model) {
  std::vector<golden::Optimizer::Group> groups;
  for (const auto& [name, shape] : golden::parameter_shapes(model))
    if (shape.size() <= 1 || name.find("norm") != std::string::npos || name.find("ln_") != std::string::npos)
      groups.push_back({.pattern = name, .lr_factor = 1, .decay_factor = 0});
  return groups;
}

}  // namespace

std::vector<golden::Optimizer::Group> optimizer_groups(const Case& c) {
  switch (c.groups) {
    case 1: return {{.pattern = "bias", .lr_factor = 1, .decay_factor = 0}};
    case 2:
      return {{.pattern = "0", .lr_factor = 0.5, .decay_factor = 2}, {.pattern = "weight", .lr_factor = 2, .decay_factor = 1}};
    case 3: return {{.pattern = "weight", .lr_factor = 0, .decay_factor = 0}};
    case kUndecayedGroups:
      return undecayed(model_of(c));
    default: return {};
  }
}

golden::Model model_of(const Case& c) {
  golden::Model model = c.model;
  const CaseOptions& o = c.options;
  if (o.lora == 0) return model;
  const std::vector<std::string> all = linear_layers(c.model);
  for (const std::string& layer : all)
    if (o.lora_layers == 0 || Draws(static_cast<uint64_t>(o.lora_layers), layer).bits(0) % 2 == 0)
      model.adapters.layers.push_back(layer);
  if (model.adapters.layers.empty()) model.adapters.layers = {all.front()};
  model.adapters.rank = o.lora;
  model.adapters.alpha = static_cast<double>(o.lora_alpha > 0 ? o.lora_alpha : 2 * o.lora);
  model.adapters.dropout = static_cast<double>(o.lora_dropout) / 100;
  return model;
}

std::vector<std::string> frozen_parameters(const Case& c, const StepPlan& plan) {
  std::vector<std::string> names;
  const bool adapted = c.options.lora > 0;
  if (plan.frozen == 0 && !adapted) return names;
  const golden::Model model = model_of(c);
  const auto shapes = golden::parameter_shapes(model);
  // What every output depends on stays.
  const std::string stays = adapted                                    ? model.adapters.layers[0] + ".lora_A.weight"
                            : c.model.kind == golden::Model::Kind::odd ? "shared.weight"
                                                                       : shapes[0].first;
  for (const auto& [name, shape] : shapes) {
    const bool is_base = adapted && name.find(".lora_") == std::string::npos;
    const bool chosen = plan.frozen != 0 && Draws(static_cast<uint64_t>(plan.frozen), name).bits(0) % 3 == 0;
    if (name != stays && (is_base || chosen)) names.push_back(name);
  }
  return names;
}

bool has_unit_sharding(const Case& c) { return c.options.unit_strategy != 0 || c.options.unit_mesh != 0; }

const shardproof::Strategy& unit_strategy(const Case& c) {
  if (c.options.unit_strategy == 0) return shardproof::strategy(c.strategy);
  for (const OptionRow& row : option_rows())
    if (row.member == &CaseOptions::unit_strategy) return shardproof::strategy(value_text(row, c.options.unit_strategy));
  return shardproof::strategy(c.strategy);
}

shardproof::Mesh unit_mesh(const Case& c) {
  const shardproof::Mesh mesh = shardproof::data_parallel_mesh(c.mesh);
  if (c.options.unit_mesh == 0 || !mesh.has(axes::dp_shard) || mesh.size(axes::dp_shard) == 1) return mesh;
  const int64_t shards = mesh.size(axes::dp_shard);
  int64_t factor = 2;
  while (shards % factor != 0) ++factor;
  std::vector<shardproof::Axis> axes;
  for (const shardproof::Axis& axis : mesh.axes()) {
    const bool next_to_replicas = !axes.empty() && axes.back().name == axes::dp_replicate;
    if (axis.name == axes::dp_shard && next_to_replicas) axes.back().size *= factor;
    if (axis.name == axes::dp_shard && !next_to_replicas) axes.push_back({axes::dp_replicate, factor});
    axes.push_back(axis.name == axes::dp_shard ? shardproof::Axis{axis.name, shards / factor} : axis);
  }
  const bool is_apart = std::ranges::count(axes, axes::dp_replicate, &shardproof::Axis::name) > 1;
  return is_apart ? mesh : shardproof::Mesh(std::move(axes));
}

int64_t expert_ranks(const Case& c) {
  const auto fits = [mesh = shardproof::data_parallel_mesh(c.mesh), own = unit_mesh(c)](int64_t ranks) {
    try {
      const shardproof::Mesh of_all = shardproof::expert_mesh(mesh, ranks), of_unit = shardproof::expert_mesh(own, ranks);
      for (int64_t rank = 0; rank < mesh.size(); ++rank)
        if (of_all.peers(rank, {axes::ep}) != of_unit.peers(rank, {axes::ep})) return false;
      return true;
    } catch (const shardproof::Error&) {
      return false;
    }
  };
  if (c.options.ep <= 1) return 1;
  int64_t ranks = c.options.ep;
  while (c.options.ep % ranks != 0 || !fits(ranks)) --ranks;
  return ranks;
}

bool is_of_experts(const std::string& parameter) {
  return parameter.find(".experts.") != std::string::npos;
}

std::vector<int64_t> Case::data_rank_of_each() const {
  std::vector<int64_t> all;
  for (int64_t rank = 0; rank < mesh.size(); ++rank) {
    const auto along = [&](const char* axis) { return mesh.has(axis) ? mesh.coordinate(rank, axis) : 0; };
    all.push_back(along(axes::dp_replicate) * shards() + along(axes::dp_shard));
  }
  return all;
}

Case Case::at(size_t step) const {
  Case result = *this;
  for (size_t i = 0; i <= step; ++i) {
    if (steps[i].load_mesh) result.mesh = *steps[i].load_mesh;
    if (!steps[i].load_strategy.empty()) result.strategy = steps[i].load_strategy;
  }
  return result;
}

int64_t Case::largest_world() const {
  int64_t ranks = mesh.size();
  for (const StepPlan& step : steps)
    if (step.load_mesh) ranks = std::max(ranks, step.load_mesh->size());
  return ranks;
}

int64_t Case::loaded_after(size_t step) const {
  for (size_t i = step + 1; i-- > 0;)
    if (steps[i].save) return static_cast<int64_t>(i) - 1;
  return -2;
}

std::string Case::str() const {
  return fmt::format("{} mesh({}) {} {} {} seed={}{} :{}", harness::str(model), mesh.str(), strategy_str(*this),
                     optimizer_str(*this), to_string(mode), seed, interleaving ? " " + interleaving->str() : "",
                     history_str(steps));
}

}  // namespace harness
