#include "harness/commands/coverage.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <set>
#include <vector>

#include "harness/case/axes.h"
#include "harness/case/facets.h"
#include "harness/case/mesh_order.h"
#include "harness/run/property.h"
#include "shardproof/algebra/strategy.h"

namespace harness {

void Coverage::add(const Case& c, const Verdict& verdict, bool passes) {
  const int64_t world = c.mesh.size();
  ++cases_;
  failures_ += !passes;
  values_compared_ += verdict.values_compared;
  ratio_max_ = std::max(ratio_max_, verdict.ratio_max);
  for (const auto& [kind, error] : verdict.smallest_found) smallest_found_[kind].push_back(error);
  for (const Property& property : harness::properties()) properties_[property.name] += 0;
  for (const std::string& name : verdict.properties) ++properties_[name];
  Row& row = rows_[{c.strategy, to_string(c.model.kind), world}];
  ++row.cases;
  row.failures += !passes;

  const auto count = [&](const std::string& feature, bool present) { features_[feature] += present; };
  for (const Mode mode : modes()) count(fmt::format("mode {}", to_string(mode)), c.mode == mode);
  for (const auto kind : optimizer_kinds()) count(fmt::format("optimizer {}", to_string(kind)), c.optimizer.kind == kind);
  const CaseOptions standard;
  for (const OptionRow& option : option_rows()) {
    const int64_t value = option.of(c.options);
    if (option.names.empty()) {
      count(option.key, value != option.of(standard));
    } else {
      for (size_t i = 0; i < option.names.size(); ++i)
        if (static_cast<int64_t>(i) != option.of(standard))
          count(fmt::format("{}={}", option.key, option.names[i]), value == static_cast<int64_t>(i));
    }
  }
  count("momentum", c.optimizer.momentum != 0);
  count("nesterov", c.optimizer.nesterov);
  count("weight decay", c.optimizer.weight_decay != 0);
  count("parameter groups", c.groups != 0);
  count("norm of order 1", c.norm_order == 1);
  count("norm of order inf", c.norm_order == 0);
  count("clip above the norm", verdict.steps_not_clipped > 0);
  count("clip below the norm", verdict.steps_clipped > 0);
  count("step skipped by loss scaling", verdict.steps_skipped > 0);
  count("diverged", verdict.diverged());
  add_history(c);
  count("mesh of two axes", c.mesh.axes().size() == 2);
  count("mesh of three axes", c.mesh.axes().size() == 3);
  count("tp", c.tensor_ranks() > 1);
  count("tp with sharding", c.tensor_ranks() > 1 && c.shards() > 1);
  count("tp of 3", c.tensor_ranks() == 3);
  count("cp", c.context_ranks() > 1);
  count("cp with sharding", c.context_ranks() > 1 && c.shards() > 1);
  count("cp with tp", c.context_ranks() > 1 && c.tensor_ranks() > 1);
  const bool canonical = c.options.arithmetic != 0;
  count("canonical tp", canonical && c.tensor_ranks() > 1);
  count("canonical sp", canonical && c.tensor_ranks() > 1 && c.options.sequence_parallel != 0);
  count("canonical tp in pieces", canonical && c.tensor_ranks() > 1 && c.options.overlap_pieces > 1);
  count("canonical cp", canonical && c.context_ranks() > 1);
  count("canonical cp with tp", canonical && c.context_ranks() > 1 && c.tensor_ranks() > 1);
  count("canonical llama", canonical && c.model.kind == golden::Model::Kind::llama);
  count("canonical dropout", canonical && c.model.dropout() > 0);
  count("canonical dropout with tp or cp", canonical && c.model.dropout() > 0 && c.microbatch_ranks() > 1);
  count("canonical dropout with recomputation", canonical && c.model.dropout() > 0 && c.options.recompute != 0);
  count("canonical key heads fewer than tp", canonical && has_copied_heads(c));
  count("canonical ring", canonical && c.context_ranks() > 1 && c.options.context_attention == 0);
  count("canonical on another mesh", canonical && std::any_of(c.steps.begin(), c.steps.end(), [&](const StepPlan& step) {
                                       return step.load_mesh && step.load_mesh->str() != c.mesh.str();
                                     }));
  count("no axis of data parallelism", !c.mesh.has(axes::dp_replicate) && !c.mesh.has(axes::dp_shard));
  count("axes in another order", !is_in_usual_order(c.mesh));
  count("one replica", c.mesh.has(axes::dp_replicate) && c.replicas() == 1);
  count("one shard", c.mesh.has(axes::dp_shard) && c.shards() == 1 && world > 1);
  count("world 1", world == 1);
  count("world above 10", world > 10);
  count("world odd, above 1", world > 1 && world % 2 == 1);
  count("world even", world % 2 == 0);
  add_model(c);
  combinations_.add(c);
}

void Coverage::add_history(const Case& c) {
  const auto any = [&](const std::string& feature, const auto& has) {
    features_[feature] += std::any_of(c.steps.begin(), c.steps.end(), has);
  };
  any("rounds 3 or more", [](const StepPlan& step) { return step.rounds >= 3; });
  any("rounds change", [&](const StepPlan& step) { return step.rounds != c.steps[0].rounds; });
  any("no_sync", [](const StepPlan& step) { return step.sync_every > 1 && step.rounds > 1; });
  any("frozen", [](const StepPlan& step) { return step.frozen != 0; });
  any("freezing changes", [&](const StepPlan& step) { return step.frozen != c.steps[0].frozen; });
  any("learning rate changes", [&](const StepPlan& step) { return step.lr_percent != c.steps[0].lr_percent; });
  any("eval forward", [](const StepPlan& step) { return step.eval; });
  any("gradients discarded", [](const StepPlan& step) { return step.discard; });
  any("unshard by hand", [](const StepPlan& step) { return step.unshard; });
  any("saved", [](const StepPlan& step) { return step.save; });
  any("crash during a save", [](const StepPlan& step) { return step.crash; });
  any("loaded on a mesh", [](const StepPlan& step) { return step.load_mesh.has_value(); });
  any("loaded under a strategy", [](const StepPlan& step) { return !step.load_strategy.empty(); });
  for (size_t s = 0; s < c.steps.size(); ++s)
    if (c.steps[s].loads() && c.loaded_after(s) + 1 < static_cast<int64_t>(s)) {
      ++features_["went back to a checkpoint"];
      break;
    }
  features_["steps 2 or more"] += c.steps.size() >= 2;
}

void Coverage::add_model(const Case& c) {
  using Kind = golden::Model::Kind;
  const bool odd = c.model.kind == Kind::odd;
  const auto count = [&](const std::string& feature, bool present) { features_[feature] += present; };
  count("tied parameter", has_ties(c));
  count("dropout", c.model.dropout() > 0);
  count("dropout with recomputation", c.model.dropout() > 0 && c.options.recompute != 0);
  count("dropout with recomputation within units", c.model.dropout() > 0 && c.options.within != 0);
  count("recomputation and activations in the host's memory", (c.options.recompute != 0 || c.options.within != 0) &&
                                                                 c.options.activations != 0);
  count("dropout with tp or cp", c.model.dropout() > 0 && c.microbatch_ranks() > 1);
  count("grouped queries", c.model.kind == Kind::llama && c.model.llama.kv_heads < c.model.llama.heads);
  count("key heads fewer than tp", has_copied_heads(c));
  count("experts", c.model.kind == Kind::llama && c.model.llama.experts > 0);
  count("experts on several ranks", expert_ranks(c) > 1);
  count("experts cut over tp", c.options.etp != 0 && c.tensor_ranks() > 1);
  count("experts cut over tp and on several ranks", c.options.etp != 0 && c.tensor_ranks() > 1 && expert_ranks(c) > 1);
  count("experts with a capacity", c.model.kind == Kind::llama && c.model.llama.expert_capacity > 0);
  count("norms of cut heads", c.model.kind == Kind::llama && c.model.llama.qk_norm && c.tensor_ranks() > 1);
  count("biases of cut heads", c.model.kind == Kind::llama && c.model.llama.qkv_bias && c.tensor_ranks() > 1);
  count("windows", c.model.kind == Kind::llama && c.model.llama.window > 0);
  count("documents", c.model.kind == Kind::llama && c.model.llama.document_end >= 0);
  count("heads of their own size", c.model.kind == Kind::llama && c.model.llama.head_size > 0);
  count("module called twice or more", odd && c.model.odd.calls > 1);
  count("0-dim parameter", odd && c.model.odd.gain);
  count("parameter of no elements", odd && c.model.odd.empty);
  count("parameter never used", odd && c.model.odd.never);
  count("parameter used on some ranks", odd && c.model.odd.side);
  bool below_world = false;
  for (const auto& [name, shape] : golden::parameter_shapes(c.model)) {
    int64_t numel = 1;
    for (const int64_t size : shape) numel *= size;
    below_world |= numel < c.mesh.size();
  }
  count("parameter below the world size", below_world);
}

nlohmann::json Coverage::pairs() const {
  nlohmann::json known = nlohmann::json::array(), drawn = nlohmann::json::array();
  const std::vector<Facet>& all = facets();
  for (size_t a = 0; a < all.size(); ++a) {
    if (!all[a].overview) continue;
    known.push_back({{"name", all[a].name}, {"values", all[a].values}});
    for (size_t b = a + 1; b < all.size(); ++b)
      for (size_t first = 0; all[b].overview && first < all[a].values.size(); ++first)
        for (size_t second = 0; second < all[b].values.size(); ++second)
          if (const int64_t cases = combinations_.cases_with(a, first, b, second); cases > 0)
            drawn.push_back({all[a].values[first], all[b].values[second], cases});
  }
  return {{"facets", std::move(known)}, {"drawn", std::move(drawn)}};
}

std::string Coverage::found_summary() const {
  std::string text;
  for (auto [kind, errors] : smallest_found_) {
    std::sort(errors.begin(), errors.end());
    text += fmt::format(
        "smallest planted relative error found, {}: {:.1e}; in half of the cases {:.1e}, at worst {:.1e} ({} cases)\n", kind,
        errors.front(), errors[errors.size() / 2], errors.back(), errors.size());
  }
  return text;
}

std::string Coverage::properties_summary() const {
  if (properties_.empty()) return "";
  std::vector<std::string> items;
  for (const auto& [name, cases] : properties_) items.push_back(fmt::format("{} {}", name, cases));
  return fmt::format("properties asked (cases): {}\n", fmt::join(items, ", "));
}

namespace {

std::string counted(size_t count, const char* one, const char* many) {
  return fmt::format("{} {}", count, count == 1 ? one : many);
}

}  // namespace

std::string Coverage::overview() const {
  std::set<std::string> named, free, models;
  std::set<int64_t> worlds;
  for (const auto& [key, row] : rows_) {
    const auto& [strategy, model, world] = key;
    const auto is_this = [&strategy = strategy](const shardproof::Strategy& known) { return known.name == strategy; };
    (std::ranges::any_of(shardproof::free_rows(), is_this) ? free : named).insert(strategy);
    models.insert(model);
    worlds.insert(world);
  }
  if (worlds.empty()) return "";
  std::string text = fmt::format("drawn: {}", counted(named.size(), "strategy", "strategies"));
  if (!free.empty()) text += fmt::format(" and {} without a name (row_*)", free.size());
  text += fmt::format(", {}, ", counted(models.size(), "kind of model", "kinds of models"));
  text += *worlds.begin() == *worlds.rbegin() ? counted(static_cast<size_t>(*worlds.begin()), "rank", "ranks")
                                              : fmt::format("{} to {} ranks", *worlds.begin(), *worlds.rbegin());
  text += fmt::format("\ncompared: {} values", values_compared_);
  if (ratio_max_ > 0) text += fmt::format("; fast mode: at most {:.2f} times the unsharded run's distance", ratio_max_);
  return text + "\n";
}

std::string Coverage::table() const {
  std::string text = fmt::format("{:<10} {:<6} {:>6} {:>8} {:>9}\n", "strategy", "model", "world", "cases", "failures");
  for (const auto& [key, row] : rows_) {
    const auto& [strategy, model, world] = key;
    text += fmt::format("{:<10} {:<6} {:>6} {:>8} {:>9}\n", strategy, model, world, row.cases, row.failures);
  }
  text += fmt::format("{:<10} {:<6} {:>6} {:>8} {:>9}\n", "all", "", "", cases_, failures_);
  return text + "row_* are rows of layouts that no framework has a name for (docs/strategies.md)\n";
}

std::string Coverage::summary() const {
  std::string text = "covered (cases):\n";
  std::string line;
  for (const auto& [feature, cases] : features_) {
    const std::string item = fmt::format("{} {}", feature, cases);
    if (line.size() + item.size() > 104) {
      text += "  " + line + "\n";
      line.clear();
    }
    line += (line.empty() ? "" : ", ") + item;
  }
  return text + "  " + line + "\n" + found_summary();
}

}  // namespace harness
