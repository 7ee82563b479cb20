#include "harness/shrink.h"

#include <algorithm>

#include "shardproof/check.h"

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

void simpler_history(std::vector<Case>& list, const Case& c) {
  lower(list, c, static_cast<int64_t>(c.rounds.size()), 1,
        [](Case& v, int64_t n) { v.rounds.resize(static_cast<size_t>(n)); });
  if (c.rounds.size() > 1)
    reset(list, c, [](Case& v) { v.rounds.erase(v.rounds.begin()); });
  for (size_t i = 0; i < c.rounds.size(); ++i)
    lower(list, c, c.rounds[i], 1, [i](Case& v, int64_t n) { v.rounds[i] = n; });
}

void simpler_model(std::vector<Case>& list, const Case& c) {
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
    return;
  }
  const golden::Mlp& m = c.model.mlp;
  for (size_t i = 0; m.widths.size() > 2 && i < m.widths.size(); ++i)
    reset(list, c, [i](Case& v) { v.model.mlp.widths.erase(v.model.mlp.widths.begin() + static_cast<int64_t>(i)); });
  for (size_t i = 0; i < m.widths.size(); ++i)
    lower(list, c, m.widths[i], 1, [i](Case& v, int64_t n) { v.model.mlp.widths[i] = n; });
  reset(list, c, [](Case& v) { v.model.mlp.activation = golden::Activation::identity; });
  reset(list, c, [](Case& v) { v.model.mlp.bias = false; });
}

void simpler_options(std::vector<Case>& list, const Case& c) {
  reset(list, c, [](Case& v) { v.units = Units::root; });
  reset(list, c, [](Case& v) { v.bucket_bytes_max = 0; });
  reset(list, c, [](Case& v) { v.reshard_after_forward = true; });
  reset(list, c, [](Case& v) { v.alignment_bytes = 64; });
  reset(list, c, [](Case& v) { v.mean_over_ranks = false; });
  reset(list, c, [](Case& v) { v.clip_norm = 0; });
  reset(list, c, [](Case& v) { v.optimizer = {.kind = golden::Optimizer::Kind::sgd, .lr = 0.1}; });
  reset(list, c, [](Case& v) { v.optimizer.weight_decay = 0; });
  reset(list, c, [](Case& v) { v.optimizer.momentum = 0; });
}

}  // namespace

std::vector<Case> simpler(const Case& c) {
  std::vector<Case> list;
  lower(list, c, c.mesh.size(), 1, [](Case& v, int64_t n) { v.mesh = shardproof::Mesh({{"dp_shard", n}}); });
  simpler_history(list, c);
  simpler_model(list, c);
  simpler_options(list, c);
  std::erase_if(list, [](const Case& variant) {
    try {
      validate(variant);
      return false;
    } catch (const shardproof::Error&) {
      return true;
    }
  });
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
