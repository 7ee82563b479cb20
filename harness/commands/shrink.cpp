#include "harness/commands/shrink.h"

#include <algorithm>
#include <future>
#include <limits>
#include <numeric>
#include <set>

#include "harness/case/axes.h"
#include "harness/case/mesh_order.h"
#include "harness/case/model_fields.h"
#include "harness/case/smallest_models.h"

namespace harness {
namespace {

// Adds variants with the value at `least`, halfway, and one less.
template <class Set>
void lower(std::vector<Case>& list, const Case& c, int64_t value, int64_t least, const Set& set) {
  for (const int64_t candidate : smaller(value, least)) {
    Case variant = c;
    set(variant, candidate);
    list.push_back(std::move(variant));
  }
}

template <class Set>
void reset(std::vector<Case>& list, const Case& c, const Set& set) {
  Case variant = c;
  set(variant);
  if (!(variant == c)) list.push_back(std::move(variant));
}

// The mesh with another size of that axis, or without the axis if the size is 0.
shardproof::Mesh with_size(const shardproof::Mesh& mesh, const std::string& name, int64_t size) {
  std::vector<shardproof::Axis> axes = mesh.axes();
  std::erase_if(axes, [&](const shardproof::Axis& axis) { return size == 0 && axis.name == name; });
  for (shardproof::Axis& axis : axes)
    if (axis.name == name) axis.size = size;
  return shardproof::Mesh(std::move(axes));
}

void simpler_mesh(std::vector<Case>& list, const Case& c) {
  reset(list, c, [](Case& v) { v.mesh = in_usual_order(v.mesh); });
  for (const shardproof::Axis& axis : c.mesh.axes())
    for (const int64_t least : {0, 1})
      lower(list, c, axis.size, least, [&](Case& v, int64_t n) { v.mesh = with_size(c.mesh, axis.name, n); });
}

// Ranks that shard parameters are simpler than ranks that cut layers or sequences.
void only_shards(std::vector<Case>& list, const Case& c) {
  if (c.microbatch_ranks() == 1) return;
  for (const int64_t ranks : {int64_t{2}, c.mesh.size()})
    reset(list, c, [&](Case& v) { v.mesh = shardproof::Mesh({{axes::dp_shard, ranks}}); });
}

// Fewer ranks that cut layers, with as many heads: another number of heads need not divide among them.
void simpler_heads(std::vector<Case>& list, const Case& c) {
  lower(list, c, c.tensor_ranks(), 1, [&](Case& v, int64_t n) {
    v.mesh = with_size(c.mesh, axes::tp, n);
    if (golden::Gpt& gpt = v.model.gpt; gpt.heads > n) {
      gpt.hidden = gpt.hidden / gpt.heads * n;
      gpt.heads = n;
    }
    if (golden::Llama& llama = v.model.llama; llama.heads > n) {
      llama.hidden = llama.hidden / llama.heads * n;
      llama.kv_heads = std::gcd(llama.kv_heads, n);
      llama.heads = n;
    }
  });
}

void simpler_load(std::vector<Case>& list, const Case& c, size_t step) {
  const StepPlan& plan = c.steps[step];
  if (plan.loads()) reset(list, c, [step](Case& v) { v.steps[step].load_mesh = {}, v.steps[step].load_strategy.clear(); });
  if (!plan.load_mesh) return;
  reset(list, c, [step](Case& v) { v.steps[step].load_mesh = in_usual_order(*v.steps[step].load_mesh); });
  if (!plan.load_strategy.empty()) reset(list, c, [step](Case& v) { v.steps[step].load_mesh = {}; });
  reset(list, c, [step](Case& v) { v.steps[step].load_strategy.clear(); });
  for (const shardproof::Axis& axis : plan.load_mesh->axes())
    lower(list, c, axis.size, 1,
          [&](Case& v, int64_t n) { v.steps[step].load_mesh = with_size(*plan.load_mesh, axis.name, n); });
}

// What comes after a load, alone: it begins where that went on.
void without_what_was_loaded(std::vector<Case>& list, const Case& c) {
  for (size_t i = c.steps.size(); i-- > 0;) {
    if (!c.steps[i].loads()) continue;
    Case rest = c.at(i);
    rest.steps.assign(c.steps.begin() + static_cast<std::ptrdiff_t>(i), c.steps.end());
    rest.steps.front().load_mesh = {};
    rest.steps.front().load_strategy.clear();
    list.push_back(std::move(rest));
  }
}

void simpler_history(std::vector<Case>& list, const Case& c) {
  without_what_was_loaded(list, c);
  lower(list, c, static_cast<int64_t>(c.steps.size()), 1, [](Case& v, int64_t n) { v.steps.resize(static_cast<size_t>(n)); });
  for (size_t i = 0; c.steps.size() > 1 && i < c.steps.size(); ++i)
    reset(list, c, [i](Case& v) { v.steps.erase(v.steps.begin() + static_cast<std::ptrdiff_t>(i)); });
  for (size_t i = 0; i < c.steps.size(); ++i) {
    lower(list, c, c.steps[i].rounds, 1, [i](Case& v, int64_t n) { v.steps[i].rounds = n; });
    lower(list, c, c.steps[i].sync_every, 1, [i](Case& v, int64_t n) { v.steps[i].sync_every = n; });
    reset(list, c, [i](Case& v) { v.steps[i].frozen = 0; });
    reset(list, c, [i](Case& v) { v.steps[i].lr_percent = 100; });
    for (bool StepPlan::*flag : {&StepPlan::eval, &StepPlan::discard, &StepPlan::unshard, &StepPlan::crash, &StepPlan::save})
      reset(list, c, [i, flag](Case& v) { v.steps[i].*flag = false; });
    simpler_load(list, c, i);
  }
}

void simpler_model(std::vector<Case>& list, const Case& c) {
  for (const ModelField& field : model_fields(c.model.kind))
    for (golden::Model& model : field.simpler(c.model)) {
      list.push_back(c);
      list.back().model = std::move(model);
    }
}

void simpler_options(std::vector<Case>& list, const Case& c) {
  reset(list, c, [](Case& v) {
    for (const OptionRow& row : option_rows()) row.of(v.options) = row.simplest;
  });
  for (const OptionRow& row : option_rows()) reset(list, c, [&](Case& v) { row.of(v.options) = row.simplest; });
  reset(list, c, [](Case& v) { v.clip_norm = 0; });
  reset(list, c, [](Case& v) { v.norm_order = 2; });
  reset(list, c, [](Case& v) { v.groups = 0; });
  reset(list, c, [](Case& v) { v.optimizer = {.kind = golden::Optimizer::Kind::sgd, .lr = 0.1}; });
  reset(list, c, [](Case& v) { v.optimizer.weight_decay = 0; });
  reset(list, c, [](Case& v) { v.optimizer.nesterov = false; });
  reset(list, c, [](Case& v) {
    v.optimizer.momentum = 0;
    v.optimizer.nesterov = false;
  });
  if (c.strategy != "zero3" && c.strategy != "ddp") reset(list, c, [](Case& v) { v.strategy = "zero3"; });
}

// No schedule is simpler than any, and a policy without numbers is simpler than drawn choices.
void simpler_schedule(std::vector<Case>& list, const Case& c) {
  using Kind = Interleaving::Kind;
  if (!c.interleaving) return;
  reset(list, c, [](Case& v) { v.interleaving.reset(); });
  if (c.interleaving->kind == Kind::eager) return;
  reset(list, c, [](Case& v) { v.interleaving = {.kind = Kind::eager}; });
  if (c.interleaving->kind == Kind::latest) return;
  reset(list, c, [](Case& v) { v.interleaving = {.kind = Kind::latest}; });
  if (c.interleaving->kind != Kind::pct) return;
  lower(list, c, c.interleaving->depth, 1, [](Case& v, int64_t n) { v.interleaving->depth = n; });
  lower(list, c, c.interleaving->steps, 1, [](Case& v, int64_t n) { v.interleaving->steps = n; });
}

// A wrong sum may show with some data only, and less often with fewer ranks and elements. So what makes a case smaller is tried
// with other data, too, when nothing else helps.
void smaller_with_other_data(std::vector<Case>& list, const Case& c) {
  std::vector<Case> smaller = with_smallest_models(c);
  simpler_mesh(smaller, c);
  simpler_heads(smaller, c);
  simpler_history(smaller, c);
  for (Case& variant : smaller)
    for (const uint64_t seed : {1, 2, 3}) {
      variant.seed = seed;
      list.push_back(variant);
    }
}

}  // namespace

std::vector<Case> simpler(const Case& c) {
  std::vector<Case> list;
  for (Case& variant : with_smallest_models(c)) list.push_back(std::move(variant));
  simpler_schedule(list, c);
  simpler_mesh(list, c);
  only_shards(list, c);
  simpler_heads(list, c);
  simpler_history(list, c);
  simpler_model(list, c);
  simpler_options(list, c);
  smaller_with_other_data(list, c);
  std::set<std::string> known = {c.str()};
  std::erase_if(list, [&](const Case& variant) { return !is_valid(variant) || !known.insert(variant.str()).second; });
  return list;
}

namespace {

// The verdicts of some candidates from `first` on, as many as there are threads.
std::vector<Verdict> run_together(const std::vector<Case>& candidates, size_t first, size_t threads,
                                  const std::function<Verdict(const Case&)>& run) {
  std::vector<Verdict> verdicts(std::min(threads, candidates.size() - first));
  std::vector<std::future<void>> others;
  for (size_t i = 1; i < verdicts.size(); ++i)
    others.push_back(std::async(std::launch::async, [&, i] { verdicts[i] = run(candidates[first + i]); }));
  verdicts[0] = run(candidates[first]);
  for (std::future<void>& other : others) other.get();
  return verdicts;
}

}  // namespace

Shrunk shrink(const Case& failing, const Verdict& verdict, const ShrinkBudget& budget,
              const std::function<Verdict(const Case&)>& run) {
  const auto deadline = std::chrono::steady_clock::now() + budget.time;
  Shrunk best{failing, verdict, 0};
  const auto spent = [&] {
    return std::chrono::steady_clock::now() >= deadline || (budget.runs > 0 && best.tried >= budget.runs);
  };
  // Whether some candidate was simpler and failed alike. They are tried in turn, beginning with the one behind the last that
  // was taken: what came before it held, and mostly holds again. The first that fails is taken, however many run at a time, and
  // those behind it count as not tried. None is tried twice, because a case has one verdict.
  size_t next = 0;
  std::set<std::string> known;
  const auto step = [&] {
    const std::vector<Case> variants = simpler(best.minimal);
    std::vector<size_t> places;  // of the candidates among the variants
    std::vector<Case> candidates;
    for (size_t i = 0; i < variants.size(); ++i) {
      const size_t place = (next + i) % variants.size();
      if (known.contains(variants[place].str())) continue;
      places.push_back(place);
      candidates.push_back(variants[place]);
    }
    for (size_t first = 0; first < candidates.size() && !spent();) {
      const int64_t left = budget.runs > 0 ? budget.runs - best.tried : std::numeric_limits<int64_t>::max();
      const auto threads = static_cast<size_t>(std::min(budget.threads, left));
      const std::vector<Verdict> found = run_together(candidates, first, threads, run);
      for (size_t i = 0; i < found.size(); ++i) {
        ++best.tried;
        known.insert(candidates[first + i].str());
        if (!fails_alike(found[i], verdict)) continue;
        best.minimal = candidates[first + i];
        best.verdict = found[i];
        next = places[first + i];
        return true;
      }
      first += found.size();
    }
    return false;
  };
  while (!spent() && step()) continue;
  return best;
}

}  // namespace harness
