#include "harness/case/facets.h"

#include <fmt/format.h>

#include <algorithm>

#include "harness/case/axes.h"
#include "harness/case/mesh_order.h"
#include "shardproof/algebra/strategy.h"

namespace harness {
namespace {

using Kind = golden::Model::Kind;

// Some dim that the mesh cuts is no multiple of the ranks that cut it.
bool has_odd_sizes(const Case& c) {
  for (const auto& [name, shape] : golden::parameter_shapes(c.model))
    if (!shape.empty() && (shape[0] % c.tensor_ranks() != 0 || shape[0] % (c.shards() * c.context_ranks()) != 0)) return true;
  return false;
}

Facet flag(const std::string& name, bool (*is)(const Case&), std::function<void(Case&, size_t)> set = {}) {
  return {name, {"no " + name, name}, [is](const Case& c) { return static_cast<size_t>(is(c)); }, std::move(set)};
}

Facet overview(Facet facet) {
  facet.overview = true;
  return facet;
}

Facet strategy_facet() {
  std::vector<std::string> names;
  for (const shardproof::Strategy& strategy : shardproof::strategies()) names.push_back(strategy.name);
  const size_t in_table = names.size();
  names.emplace_back("row outside the table");
  const auto of = [names](const Case& c) { return static_cast<size_t>(std::ranges::find(names, c.strategy) - names.begin()); };
  return {"strategy", names, [=](const Case& c) { return std::min(of(c), in_table); },
          [=](Case& c, size_t value) {
            if (value < in_table) c.strategy = names[value];
          }};
}

template <class Value>
Facet choice(const char* name, const std::vector<Value>& all, Value (*of)(const Case&)) {
  std::vector<std::string> names;
  for (const Value value : all) names.emplace_back(to_string(value));
  return {name, names, [=](const Case& c) { return static_cast<size_t>(std::ranges::find(all, of(c)) - all.begin()); }};
}

Facet world_facet() {
  return {"world", {"world 1", "world 2 to 4", "world 5 to 10", "world above 10"}, [](const Case& c) -> size_t {
            const int64_t ranks = c.mesh.size();
            return ranks == 1 ? 0 : ranks <= 4 ? 1 : ranks <= 10 ? 2 : 3;
          }};
}

// One value for each number; what lies between two of them counts as the lower one.
Facet numbers(const std::string& name, const std::vector<int64_t>& sorted, std::vector<std::string> texts,
              std::function<int64_t(const Case&)> of, std::function<void(Case&, int64_t)> set) {
  const auto index = [=](const Case& c) -> size_t {
    const auto above = std::ranges::upper_bound(sorted, of(c)) - sorted.begin();
    return static_cast<size_t>(std::max<int64_t>(0, above - 1));
  };
  return {name, std::move(texts), index, [=](Case& c, size_t value) { set(c, sorted[value]); }};
}

Facet option_facet(const OptionRow& row) {
  const CaseOptions standard;
  std::vector<int64_t> values = row.others;
  values.push_back(row.of(standard));
  std::ranges::sort(values);
  values.erase(std::unique(values.begin(), values.end()), values.end());
  std::vector<std::string> texts;
  for (const int64_t value : values) texts.push_back(fmt::format("{}={}", row.key, value_text(row, value)));
  return numbers(
      row.key, values, texts, [&row](const Case& c) { return row.of(c.options); },
      [&row](Case& c, int64_t value) { row.of(c.options) = value; });
}

void add_models(std::vector<Facet>& all) {
  all.push_back(overview({"model", {"gpt", "llama", "mlp", "conv", "odd"}, [](const Case& c) -> size_t {
                            switch (c.model.kind) {
                              case Kind::gpt:
                                return 0;
                              case Kind::llama:
                                return 1;
                              case Kind::mlp:
                                return 2;
                              case Kind::conv:
                                return 3;
                              case Kind::odd:
                                return 4;
                            }
                            return 0;
                          }}));
  all.push_back(overview(flag("dropout", [](const Case& c) { return c.model.dropout() > 0; })));
  all.push_back(overview(flag("ties", has_ties)));
  all.push_back(
      overview(flag("experts", [](const Case& c) { return c.model.kind == Kind::llama && c.model.llama.experts > 0; })));
  all.push_back(overview(flag("odd sizes", has_odd_sizes)));
}

void add_meshes(std::vector<Facet>& all) {
  all.push_back(overview(flag("tp", [](const Case& c) { return c.tensor_ranks() > 1; })));
  all.push_back(overview(flag("cp", [](const Case& c) { return c.context_ranks() > 1; })));
  all.push_back(flag("several replicas", [](const Case& c) { return c.replicas() > 1; }));
  all.push_back(flag("several shards", [](const Case& c) { return c.shards() > 1; }));
  all.push_back(flag(
      "axes in another order", [](const Case& c) { return !is_in_usual_order(c.mesh); },
      [](Case& c, size_t value) {
        const std::vector<shardproof::Mesh> orders = in_other_orders(c.mesh);
        c.mesh = value == 1 && !orders.empty() ? orders.front() : in_usual_order(c.mesh);
      }));
  all.push_back(world_facet());
}

// Momentum is a field of some optimizers only; the text of a case has none beside the others.
bool has_momentum(const Case& c) {
  return c.optimizer.kind == golden::Optimizer::Kind::sgd || c.optimizer.kind == golden::Optimizer::Kind::muon;
}

void add_optimizer(std::vector<Facet>& all) {
  all.push_back(
      choice<golden::Optimizer::Kind>("optimizer", optimizer_kinds(), [](const Case& c) { return c.optimizer.kind; }));
  all.push_back(flag(
      "momentum", [](const Case& c) { return c.optimizer.momentum != 0; },
      [](Case& c, size_t value) {
        if (has_momentum(c)) c.optimizer.momentum = value ? 0.5 : 0;
      }));
  all.push_back(flag(
      "nesterov", [](const Case& c) { return c.optimizer.nesterov; },
      [](Case& c, size_t value) {
        if (c.optimizer.kind != golden::Optimizer::Kind::sgd) return;
        c.optimizer.nesterov = value != 0;
        if (value && c.optimizer.momentum == 0) c.optimizer.momentum = 0.5;
      }));
  all.push_back(flag(
      "decay", [](const Case& c) { return c.optimizer.weight_decay != 0; },
      [](Case& c, size_t value) { c.optimizer.weight_decay = value ? 0.1 : 0; }));
  all.push_back(flag(
      "clip", [](const Case& c) { return c.clip_norm != 0; }, [](Case& c, size_t value) { c.clip_norm = value ? 0.5 : 0; }));
  all.push_back(numbers(
      "norm", {0, 1, 2}, {"norm=inf", "norm=1", "norm=2"}, [](const Case& c) { return c.norm_order; },
      [](Case& c, int64_t value) { c.norm_order = value; }));
  std::vector<int64_t> groups;
  std::vector<std::string> texts;
  for (int64_t i = 0; i <= kOptimizerGroups; ++i) groups.push_back(i), texts.push_back(fmt::format("groups={}", i));
  all.push_back(numbers(
      "groups", groups, texts, [](const Case& c) { return c.groups; }, [](Case& c, int64_t value) { c.groups = value; }));
}

// An event of some step. It is set in the first one.
Facet event(const char* name, bool StepPlan::*member) {
  return {name,
          {fmt::format("no {}", name), name},
          [=](const Case& c) {
            return static_cast<size_t>(std::ranges::any_of(c.steps, [=](const StepPlan& s) { return s.*member; }));
          },
          [=](Case& c, size_t value) {
            for (StepPlan& step : c.steps) step.*member = step.*member && value;
            c.steps.front().*member = value != 0;
          }};
}

// A number that differs from the usual one in some step. It is set in the last one.
Facet setting(const char* name, int64_t StepPlan::*member, int64_t other) {
  const int64_t usual = StepPlan{}.*member;
  return {name,
          {fmt::format("no {}", name), name},
          [=](const Case& c) {
            return static_cast<size_t>(std::ranges::any_of(c.steps, [=](const StepPlan& s) { return s.*member != usual; }));
          },
          [=](Case& c, size_t value) {
            for (StepPlan& step : c.steps) step.*member = value ? step.*member : usual;
            if (value) c.steps.back().*member = other;
          }};
}

void save_first(Case& c) {
  if (c.loaded_after(c.steps.size() - 1) < -1) c.steps.front().save = true;
}

void add_history(std::vector<Facet>& all) {
  all.push_back(flag("several steps", [](const Case& c) { return c.steps.size() > 1; }));
  all.push_back(setting("accumulation", &StepPlan::rounds, 3));
  all.push_back(setting("no_sync", &StepPlan::sync_every, 2));
  all.push_back(setting("frozen", &StepPlan::frozen, 3));
  all.push_back(setting("rate of its own", &StepPlan::lr_percent, 50));
  all.push_back(event("eval forward", &StepPlan::eval));
  all.push_back(event("discarded gradients", &StepPlan::discard));
  all.push_back(event("unshard by hand", &StepPlan::unshard));
  all.push_back(event("save", &StepPlan::save));
  all.push_back(event("crash during a save", &StepPlan::crash));
  const auto any = [](const Case& c, auto has) { return static_cast<size_t>(std::ranges::any_of(c.steps, has)); };
  all.push_back({"load on a mesh",
                 {"no load on a mesh", "load on a mesh"},
                 [=](const Case& c) { return any(c, [](const StepPlan& s) { return s.load_mesh.has_value(); }); },
                 [](Case& c, size_t value) {
                   for (StepPlan& step : c.steps) step.load_mesh.reset();
                   if (!value) return;
                   save_first(c);
                   std::vector<shardproof::Axis> axes = c.mesh.axes();
                   for (shardproof::Axis& axis : axes)
                     if (axis.name == axes::dp_shard && axis.size > 1) --axis.size;
                   c.steps.back().load_mesh = shardproof::Mesh(std::move(axes));
                 }});
  all.push_back({"load under a strategy",
                 {"no load under a strategy", "load under a strategy"},
                 [=](const Case& c) { return any(c, [](const StepPlan& s) { return !s.load_strategy.empty(); }); },
                 [](Case& c, size_t value) {
                   for (StepPlan& step : c.steps) step.load_strategy.clear();
                   if (!value) return;
                   save_first(c);
                   c.steps.back().load_strategy = c.strategy == "zero3" ? "zero2" : "zero3";
                 }});
}

std::vector<Facet> make_facets() {
  std::vector<Facet> all;
  all.push_back(overview(strategy_facet()));
  all.push_back(choice<Mode>("mode", modes(), [](const Case& c) { return c.mode; }));
  add_models(all);
  add_meshes(all);
  add_optimizer(all);
  add_history(all);
  for (const OptionRow& row : option_rows()) {
    all.push_back(option_facet(row));
    using O = CaseOptions;
    for (int64_t O::*member : {&O::sequence_parallel, &O::compute, &O::reduce, &O::recompute})
      all.back().overview |= row.member == member;
  }
  return all;
}

}  // namespace

bool has_ties(const Case& c) {
  return (c.model.kind == Kind::gpt && c.model.gpt.tied) || (c.model.kind == Kind::llama && c.model.llama.tied) ||
         (c.model.kind == Kind::odd && c.model.odd.tied);
}

bool has_copied_heads(const Case& c) {
  return c.model.kind == Kind::llama && c.model.llama.kv_heads < c.tensor_ranks();
}

const std::vector<Facet>& facets() {
  static const std::vector<Facet> all = make_facets();
  return all;
}

}  // namespace harness
