#include "harness/commands/shrink.h"

#include <algorithm>

namespace harness {
namespace {

// Adds variants with the value at `least`, halfway, and one less.
template <class Set>
void lower(std::vector<Case>& list, const Case& c, int64_t value, int64_t least, const Set& set) {
  for (const int64_t smaller : {least, (least + value) / 2, value - 1}) {
    if (smaller >= value || smaller < least) continue;
    Case variant = c;
    set(variant, smaller);
    list.push_back(std::move(variant));
  }
}

template <class Set>
void reset(std::vector<Case>& list, const Case& c, const Set& set) {
  Case variant = c;
  set(variant);
  if (!(variant == c)) list.push_back(std::move(variant));
}

void simpler_mesh(std::vector<Case>& list, const Case& c) {
  for (const shardproof::Axis& axis : c.mesh.axes()) {
    const auto with_size = [&](int64_t size) {
      std::vector<shardproof::Axis> axes = c.mesh.axes();
      std::erase_if(axes, [&](const shardproof::Axis& a) { return size == 0 && a.name == axis.name; });
      for (shardproof::Axis& a : axes)
        if (a.name == axis.name) a.size = size;
      return shardproof::Mesh(std::move(axes));
    };
    lower(list, c, axis.size, 0, [&](Case& v, int64_t n) { v.mesh = with_size(n); });
    lower(list, c, axis.size, 1, [&](Case& v, int64_t n) { v.mesh = with_size(n); });
  }
}

void simpler_load(std::vector<Case>& list, const Case& c, size_t step) {
  const StepPlan& plan = c.steps[step];
  if (plan.loads())
    reset(list, c, [step](Case& v) { v.steps[step].load_mesh = {}, v.steps[step].load_strategy.clear(); });
  if (!plan.load_mesh) return;
  if (!plan.load_strategy.empty()) reset(list, c, [step](Case& v) { v.steps[step].load_mesh = {}; });
  reset(list, c, [step](Case& v) { v.steps[step].load_strategy.clear(); });
  const int64_t last = plan.load_mesh->axes().empty() ? 0 : plan.load_mesh->axes().back().size;
  lower(list, c, last, 1, [step](Case& v, int64_t n) {
    std::vector<shardproof::Axis> axes = v.steps[step].load_mesh->axes();
    axes.back().size = n;
    v.steps[step].load_mesh = shardproof::Mesh(std::move(axes));
  });
}

void simpler_history(std::vector<Case>& list, const Case& c) {
  lower(list, c, static_cast<int64_t>(c.steps.size()), 1,
        [](Case& v, int64_t n) { v.steps.resize(static_cast<size_t>(n)); });
  if (c.steps.size() > 1)
    reset(list, c, [](Case& v) { v.steps.erase(v.steps.begin()); });
  for (size_t i = 0; i < c.steps.size(); ++i) {
    lower(list, c, c.steps[i].rounds, 1, [i](Case& v, int64_t n) { v.steps[i].rounds = n; });
    lower(list, c, c.steps[i].sync_every, 1, [i](Case& v, int64_t n) { v.steps[i].sync_every = n; });
    reset(list, c, [i](Case& v) { v.steps[i].frozen = 0; });
    reset(list, c, [i](Case& v) { v.steps[i].lr_percent = 100; });
    for (bool StepPlan::* flag : {&StepPlan::eval, &StepPlan::discard, &StepPlan::unshard, &StepPlan::crash, &StepPlan::save})
      reset(list, c, [i, flag](Case& v) { v.steps[i].*flag = false; });
    simpler_load(list, c, i);
  }
}

template <class Sizes>
void simpler_list(std::vector<Case>& list, const Case& c, const Sizes& sizes) {
  const std::vector<int64_t>& values = sizes(c);
  for (size_t i = 0; values.size() > 2 && i < values.size(); ++i)
    reset(list, c, [&, i](Case& v) { sizes(v).erase(sizes(v).begin() + static_cast<int64_t>(i)); });
  for (size_t i = 0; i < values.size(); ++i)
    lower(list, c, values[i], 1, [&, i](Case& v, int64_t n) { sizes(v)[i] = n; });
}

void simpler_llama(std::vector<Case>& list, const Case& c) {
  const golden::Llama& m = c.model.llama;
  const int64_t head = m.hidden / m.heads, group = m.heads / m.kv_heads;
  const auto heads = [head](Case& v, int64_t kv_heads, int64_t queries) {
    v.model.llama.kv_heads = kv_heads;
    v.model.llama.heads = kv_heads * queries;
    v.model.llama.hidden = v.model.llama.heads * head;
  };
  lower(list, c, m.layers, 1, [](Case& v, int64_t n) { v.model.llama.layers = n; });
  lower(list, c, m.kv_heads, 1, [=](Case& v, int64_t n) { heads(v, n, group); });
  lower(list, c, group, 1, [=](Case& v, int64_t n) { heads(v, v.model.llama.kv_heads, n); });
  lower(list, c, head / 2, 1, [](Case& v, int64_t n) { v.model.llama.hidden = v.model.llama.heads * 2 * n; });
  lower(list, c, m.intermediate, 1, [](Case& v, int64_t n) { v.model.llama.intermediate = n; });
  lower(list, c, m.vocab, 1, [](Case& v, int64_t n) { v.model.llama.vocab = n; });
  lower(list, c, m.positions, 1, [](Case& v, int64_t n) { v.model.llama.positions = n; });
  reset(list, c, [](Case& v) { v.model.llama.tied = false; });
  reset(list, c, [](Case& v) { v.model.llama.dropout = 0; });
  reset(list, c, [](Case& v) { v.model.llama.qk_norm = false; });
}

void simpler_model(std::vector<Case>& list, const Case& c) {
  if (c.model.kind == golden::Model::Kind::llama) return simpler_llama(list, c);
  if (c.model.kind == golden::Model::Kind::gpt) {
    const golden::Gpt& g = c.model.gpt;
    lower(list, c, g.layers, 1, [](Case& v, int64_t n) { v.model.gpt.layers = n; });
    lower(list, c, g.heads, 1, [](Case& v, int64_t n) {
      v.model.gpt.hidden = v.model.gpt.hidden / v.model.gpt.heads * n;
      v.model.gpt.heads = n;
    });
    lower(list, c, g.hidden / g.heads, 1, [](Case& v, int64_t n) { v.model.gpt.hidden = v.model.gpt.heads * n; });
    lower(list, c, g.vocab, 1, [](Case& v, int64_t n) { v.model.gpt.vocab = n; });
    lower(list, c, g.positions, 1, [](Case& v, int64_t n) { v.model.gpt.positions = n; });
    reset(list, c, [](Case& v) { v.model.gpt.tied = false; });
    reset(list, c, [](Case& v) { v.model.gpt.dropout = 0; });
    return;
  }
  if (c.model.kind == golden::Model::Kind::conv) {
    simpler_list(list, c, [](auto& v) -> auto& { return v.model.conv.channels; });
    reset(list, c, [](Case& v) { v.model.conv.kernel = 1; });
    lower(list, c, c.model.conv.size, 1, [](Case& v, int64_t n) { v.model.conv.size = n; });
    lower(list, c, c.model.conv.classes, 1, [](Case& v, int64_t n) { v.model.conv.classes = n; });
    reset(list, c, [](Case& v) { v.model.conv.norm = false; });
    return;
  }
  if (c.model.kind == golden::Model::Kind::odd) {
    lower(list, c, c.model.odd.width, 1, [](Case& v, int64_t n) { v.model.odd.width = n; });
    lower(list, c, c.model.odd.calls, 1, [](Case& v, int64_t n) { v.model.odd.calls = n; });
    using golden::Odd;
    for (bool Odd::* part : {&Odd::gain, &Odd::cube, &Odd::empty, &Odd::side, &Odd::never, &Odd::tied})
      reset(list, c, [part](Case& v) { v.model.odd.*part = false; });
    return;
  }
  simpler_list(list, c, [](auto& v) -> auto& { return v.model.mlp.widths; });
  reset(list, c, [](Case& v) { v.model.mlp.activation = golden::Activation::identity; });
  reset(list, c, [](Case& v) { v.model.mlp.bias = false; });
}

void simpler_options(std::vector<Case>& list, const Case& c) {
  for (const OptionRow& row : option_rows())
    reset(list, c, [&](Case& v) { v.options.*row.member = row.simplest; });
  reset(list, c, [](Case& v) { v.clip_norm = 0; });
  reset(list, c, [](Case& v) { v.norm_order = 2; });
  reset(list, c, [](Case& v) { v.groups = 0; });
  reset(list, c, [](Case& v) { v.optimizer = {.kind = golden::Optimizer::Kind::sgd, .lr = 0.1}; });
  reset(list, c, [](Case& v) { v.optimizer.weight_decay = 0; });
  reset(list, c, [](Case& v) { v.optimizer.nesterov = false; });
  reset(list, c, [](Case& v) { v.optimizer.momentum = 0; v.optimizer.nesterov = false; });
  if (c.strategy != "zero3" && c.strategy != "ddp") reset(list, c, [](Case& v) { v.strategy = "zero3"; });
}

}  // namespace

std::vector<Case> simpler(const Case& c) {
  std::vector<Case> list;
  simpler_mesh(list, c);
  simpler_history(list, c);
  simpler_model(list, c);
  simpler_options(list, c);
  std::erase_if(list, [](const Case& variant) { return !is_valid(variant); });
  return list;
}

Shrunk shrink(const Case& failing, const Verdict& verdict, std::chrono::milliseconds budget,
              const std::function<Verdict(const Case&)>& run) {
  const auto deadline = std::chrono::steady_clock::now() + budget;
  Shrunk best{failing, verdict, 0};
  for (bool progress = true; progress;) {
    progress = false;
    for (const Case& candidate : simpler(best.minimal)) {
      if (std::chrono::steady_clock::now() >= deadline) return best;
      ++best.tried;
      const Verdict found = run(candidate);
      if (found.held || found.category != verdict.category) continue;
      best.minimal = candidate;
      best.verdict = found;
      progress = true;
      break;
    }
  }
  return best;
}

}  // namespace harness
