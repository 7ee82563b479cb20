#include "harness/case/generate.h"

#include <algorithm>
#include <cmath>

#include "harness/case/axes.h"
#include "harness/case/mesh_order.h"
#include "harness/case/mix.h"
#include "harness/case/parallel_sizes.h"
#include "harness/case/random.h"
#include "harness/case/together.h"
#include "harness/case/work.h"
#include "shardproof/algebra/strategy.h"
#include "shardproof/base/check.h"

namespace harness {
namespace {

using shardproof::Mesh;

golden::Model generate_mlp(Chooser& choose, bool exact) {
  using enum golden::Activation;
  golden::Model model;
  model.kind = golden::Model::Kind::mlp;
  const int64_t layers = choose.integer(1, exact ? 3 : 4);
  const int64_t width_max = exact ? 9 : choose.one_of<int64_t>({3, 13, 40});
  for (int64_t i = 0; i <= layers; ++i) model.mlp.widths.push_back(choose.integer(1, width_max));
  model.mlp.activation = exact ? choose.one_of<golden::Activation>({identity, relu})
                               : choose.one_of<golden::Activation>({identity, relu, tanh, gelu});
  model.mlp.bias = choose.chance(0.7);
  return model;
}

double generate_dropout(Chooser& choose) {
  return choose.chance(0.3) ? choose.one_of<double>({0.1, 0.25, 0.5}) : 0;
}

// Layer norm over a few features turns rounding into values, which no tolerance can judge: `head_min` keeps clear of that.
// `large_allowed`: canonical products are plain loops in the golden run.
golden::Model generate_gpt(Chooser& choose, int64_t head_min, int64_t heads_max = 3, bool large_allowed = true) {
  golden::Model model;
  model.kind = golden::Model::Kind::gpt;
  golden::Gpt& g = model.gpt;
  g.layers = choose.chance(0.6) ? 1 : choose.integer(2, 3);
  g.heads = choose.integer(1, heads_max);
  g.hidden = g.heads * choose.integer(head_min, 8);
  g.vocab = choose.integer(2, 37);
  g.positions = choose.integer(1, 9);
  g.tied = choose.chance(0.4);
  if (choose.chance(0.03) && large_allowed) {
    // Large enough that kernels take the paths of real models: one of them rounded differently only here.
    g.hidden = g.heads * choose.integer(16, 48);
    g.vocab = choose.integer(100, 300);
    g.positions = choose.integer(32, 70);
  }
  g.dropout = generate_dropout(choose);
  return model;
}

golden::Model generate_llama(Chooser& choose, int64_t head_min) {
  golden::Model model;
  model.kind = golden::Model::Kind::llama;
  golden::Llama& m = model.llama;
  m.layers = choose.chance(0.6) ? 1 : choose.integer(2, 3);
  m.kv_heads = choose.integer(1, 3);
  m.heads = m.kv_heads * choose.integer(1, 3);
  m.hidden = m.heads * 2 * choose.integer(head_min / 2, 4);
  m.intermediate = choose.integer(1, 23);
  m.vocab = choose.integer(2, 37);
  m.positions = choose.integer(1, 9);
  m.tied = choose.chance(0.4);
  m.dropout = generate_dropout(choose);
  m.qk_norm = m.hidden / m.heads >= 4 && choose.chance(0.5);  // narrower norms are hard to judge
  return model;
}

// What only some families of a llama have. Drawn apart, so that all else of a case is what it was without them.
void generate_family(Chooser choose, golden::Model& model) {
  if (model.kind == golden::Model::Kind::gpt) model.gpt.tanh_gelu = choose.chance(0.25);
  if (model.kind != golden::Model::Kind::llama) return;
  model.llama.qkv_bias = choose.chance(0.35);
  if (choose.chance(0.25)) model.llama.head_size = 2 * choose.integer(2, 5);
  if (choose.chance(0.2)) model.llama.theta = choose.one_of<double>({500'000, 1e6});
  if (choose.chance(0.2)) model.llama.eps = choose.one_of<double>({1e-4, 1e-3});
  if (!choose.chance(0.2)) return;
  // In sequences this short no turn is long otherwise.
  model.llama.rope_factor = choose.one_of<double>({2, 8});
  model.llama.rope_positions = choose.one_of<int64_t>({20, 200, 8192});
}

// The attention of DeepSeek-V3, and that of GLM-4.5, of whose heads a part turns. Drawn apart as well. Narrow norms are hard to
// judge, as are sums over the heads of one key.
void generate_latents(Chooser choose, golden::Model& model, Mode mode) {
  golden::Llama& m = model.llama;
  if (model.kind != golden::Model::Kind::llama || m.head() < 4 || !choose.chance(0.35)) return;
  m.rotary_size = 2 * choose.integer(1, m.head() / 2 - 1);
  if (choose.chance(0.3)) return;
  const int64_t least = mode == Mode::fast ? 4 : 1;
  m.kv_heads = m.heads;
  m.qk_norm = m.qkv_bias = false;
  m.kv_rank = choose.integer(least, 7);
  if (choose.chance(0.6)) m.query_rank = choose.integer(least, 7);
  if (choose.chance(0.6)) m.value_size = choose.integer(1, m.head());
  m.interleaved = choose.chance(0.6);
  if (m.rope_factor == 1 || !choose.chance(0.6)) return;
  m.rope_yarn = true;
  m.rope_mscale = choose.one_of<double>({0, 0.5, 1});
}

// Which keys a query sees. Drawn apart as well.
void generate_sight(Chooser choose, golden::Model& model, Mode mode) {
  golden::Llama& m = model.llama;
  if (model.kind != golden::Model::Kind::llama) return;
  // Of a query that sees itself alone, gradients of scores are roundings, which no tolerance can judge.
  if (choose.chance(0.3)) {
    const int64_t least = mode == Mode::fast ? 2 : 1;
    m.window = choose.integer(least, std::max(least, m.positions - 1));
    if (choose.chance(0.4)) m.full_layers = choose.integer(0, m.layers - 1);
  }
  if (choose.chance(0.3) && (mode != Mode::fast || has_long_documents(m)))
    m.document_end = choose.integer(0, std::min<int64_t>(m.vocab, 4) - 1);
}

void generate_balance(Chooser& choose, golden::Llama& m) {
  if (choose.chance(0.4)) {
    m.expert_balance = choose.one_of<double>({0.01, 0.5});
    if (choose.chance(0.5)) m.balance_over = golden::Llama::BalanceOver::step;
  }
  if (choose.chance(0.3)) m.expert_z = choose.one_of<double>({0.001, 0.25});
  if (choose.chance(0.4)) m.expert_bias = choose.one_of<double>({0.001, 0.5});
}

void generate_experts(Chooser choose, Case& c) {
  using enum golden::Llama::Score;
  golden::Llama& m = c.model.llama;
  if (c.model.kind != golden::Model::Kind::llama) return;
  if (!choose.chance(c.mode == Mode::fast ? 0.7 : 0.5)) return;
  const bool slow = c.options.arithmetic != 0;  // plain loops
  m.experts = slow ? choose.integer(1, 4) : choose.one_of<int64_t>({1, 2, 3, 4, 4, 5, 6, 6});
  m.expert_width = choose.integer(2, 6);
  if (choose.chance(0.4)) m.shared_width = choose.integer(1, 6);
  if (m.layers > 1 && choose.chance(0.7)) m.dense_layers = choose.integer(1, m.layers - 1);
  m.score = choose.one_of<golden::Llama::Score>({softmax, chosen_softmax, sigmoid});
  m.normalized = choose.chance(0.6);
  if (choose.chance(0.3)) m.expert_scale = choose.one_of<double>({0.5, 2.5});
  if (m.experts % 2 == 0 && choose.chance(0.6)) {
    m.expert_groups = choose.one_of<int64_t>({2, 2, m.experts});
    const bool all = choose.chance(0.2);  // which are as one group
    m.groups_per_token = all ? m.expert_groups : choose.integer(1, m.expert_groups - 1);
  }
  m.experts_per_token = choose.integer(1, std::min<int64_t>(3, m.experts / m.expert_groups * m.groups_per_token));
  generate_balance(choose, m);
  // A number over itself is 1: what is left of its gradient are roundings, which no tolerance can judge.
  if (c.mode == Mode::fast && m.experts_per_token == 1) m.normalized = false;
  if (c.mode == Mode::fast && m.experts == 1) m.expert_balance = 0, m.balance_over = golden::Llama::BalanceOver::sequence;
}

// A norm over few values, as small images have, is as hard to judge as a narrow layer norm.
golden::Model generate_conv(Chooser& choose, bool norms_allowed) {
  golden::Model model;
  model.kind = golden::Model::Kind::conv;
  golden::Conv& v = model.conv;
  const int64_t layers = choose.integer(1, 2);
  for (int64_t i = 0; i <= layers; ++i) v.channels.push_back(choose.integer(1, 5));
  v.kernel = choose.one_of<int64_t>({1, 3});
  v.size = choose.integer(2, 5);
  v.classes = choose.integer(1, 4);
  v.norm = norms_allowed && choose.chance(0.5);
  return model;
}

golden::Model generate_odd(Chooser& choose) {
  golden::Model model;
  model.kind = golden::Model::Kind::odd;
  golden::Odd& d = model.odd;
  d.width = choose.integer(1, 7);
  d.calls = choose.integer(1, 3);
  for (bool* part : {&d.gain, &d.cube, &d.empty, &d.side, &d.never, &d.tied}) *part = choose.chance(0.6);
  return model;
}

// To be cut over tp or cp.
golden::Model generate_language_model(Chooser& choose, Mode mode) {
  const bool plain = mode != Mode::canonical;
  return choose.chance(0.5) ? generate_llama(choose, plain ? 4 : 2) : generate_gpt(choose, plain ? 4 : 1, 6, plain);
}

golden::Model generate_model(Chooser& choose, Mode mode, bool parallel) {
  if (mode == Mode::exact) return generate_mlp(choose, true);
  const bool plain = mode != Mode::canonical;
  if (parallel) return choose.chance(0.2) ? generate_mlp(choose, false) : generate_language_model(choose, mode);
  const double kind = choose.unit();
  if (kind < 0.25) return generate_mlp(choose, false);
  if (kind < 0.4) return generate_gpt(choose, mode == Mode::fast ? 4 : 1, 3, plain);
  if (kind < 0.65) return generate_llama(choose, mode == Mode::fast ? 4 : 2);
  if (kind < 0.8) return generate_conv(choose, mode != Mode::fast);
  return generate_odd(choose);
}

void generate_optimizer(Chooser& choose, Case& c) {
  using enum golden::Optimizer::Kind;
  golden::Optimizer& o = c.optimizer;
  const bool exact = c.mode == Mode::exact;
  o.kind = exact ? choose.one_of<golden::Optimizer::Kind>({sgd, adamw})
                 : choose.one_of<golden::Optimizer::Kind>({sgd, sgd, sgd, adamw, adamw, adam, lion, muon});
  // A sign, or a direction of unit size, turns the rounding of a small value into a step: no tolerance can judge that.
  if (c.mode == Mode::fast && (o.kind == lion || o.kind == muon)) o.kind = sgd;
  if (choose.chance(0.4)) o.weight_decay = choose.one_of<double>({0.01, 0.1});
  if (o.kind == sgd) {
    o.lr = choose.one_of<double>({0.01, 0.1, 0.3});
    if (choose.chance(0.5)) o.momentum = choose.one_of<double>({0.5, 0.9});
    o.nesterov = o.momentum > 0 && choose.chance(0.3);
  } else {
    o.lr = choose.one_of<double>({0.001, 0.01, 0.1});
    if (o.kind == muon) o.momentum = choose.one_of<double>({0, 0.5, 0.95});
    if (choose.chance(0.3)) o.beta1 = choose.one_of<double>({0, 0.5, 0.8});
    if (choose.chance(0.3)) o.beta2 = choose.one_of<double>({0.5, 0.9, 0.95});
    if (choose.chance(0.2)) o.eps = 1e-6;
  }
  if (choose.chance(0.25)) c.groups = choose.integer(1, o.kind == muon ? kOptimizerGroups - 1 : kOptimizerGroups);
  // Norms of generated gradients spread around 1: a third of these clips bites, the rest does not.
  if (choose.chance(0.4)) c.clip_norm = std::ldexp(1.0, static_cast<int>(choose.integer(-5, 6)));
  if (choose.chance(0.3)) c.norm_order = choose.one_of<int64_t>({1, 0});
}

bool can_run(const shardproof::Strategy& row, const Mesh& mesh, Mode mode) {
  const shardproof::Strategy strategy = shardproof::on_mesh(row, mesh);
  return can_sum_on(strategy, mesh) && (mode != Mode::ordered || !sums_replicas_first(strategy, mesh));
}

// Names of those rows that the mesh and the mode allow, if there is a mesh.
std::vector<std::string> names_on(const std::optional<Mesh>& mesh, Mode mode, const std::vector<shardproof::Strategy>& rows) {
  const Mesh seen = shardproof::data_parallel_mesh(mesh.value_or(Mesh()));
  std::vector<std::string> names;
  for (const shardproof::Strategy& row : rows) {
    try {
      if (!mesh || can_run(row, seen, mode)) names.push_back(row.name);
    } catch (const shardproof::Error&) {
    }
  }
  return names;
}

std::vector<std::string> strategies_on(const std::optional<Mesh>& mesh, Mode mode) {
  std::vector<std::string> names = names_on(mesh, mode, shardproof::strategies());
  SHARD_REQUIRE(!names.empty(), "case", "no strategy runs on mesh {}; give it an axis dp_shard or dp_replicate", mesh->str());
  return names;
}

Mesh generate_mesh(Chooser& choose, const Limits& limits, const std::string& strategy) {
  if (limits.mesh) return *limits.mesh;
  const bool needs_both = shardproof::strategy(strategy).axes.size() == 2;
  if (!needs_both && choose.chance(0.6)) return Mesh({{axes::dp_shard, choose.integer(1, limits.world_max)}});
  if (strategy == "ddp" && choose.chance(0.3)) return Mesh({{axes::dp_replicate, choose.integer(1, limits.world_max)}});
  const int64_t replicas = choose.integer(1, std::min<int64_t>(4, limits.world_max));
  return Mesh(
      {{axes::dp_replicate, replicas}, {axes::dp_shard, choose.integer(1, std::max<int64_t>(1, limits.world_max / replicas))}});
}

// With axes cp and tp besides, within the limit on the world.
Mesh generate_parallel_mesh(Chooser& choose, Limits limits, const std::string& strategy, bool context_allowed) {
  std::vector<shardproof::Axis> inner;
  const double kind = choose.unit();
  const auto add = [&](const char* name, int64_t most) {
    const int64_t ranks = choose.integer(2, most);
    if (ranks > limits.world_max) return;
    limits.world_max /= ranks;
    inner.push_back({name, ranks});
  };
  if (context_allowed && kind < 0.5) add(axes::cp, 4);
  if (!context_allowed || kind > 0.3) add(axes::tp, 4);
  std::vector<shardproof::Axis> axes = generate_mesh(choose, limits, strategy).axes();
  // One replica needs no axis that says so.
  const Mesh inner_mesh(inner), outer(axes);
  if (outer.size() == 1 && inner_mesh.size() > 1 && shardproof::strategy(strategy).axes.size() < 2 && choose.chance(0.6))
    axes.clear();
  axes.insert(axes.end(), inner.begin(), inner.end());
  return Mesh(axes);
}

void fit_heads(golden::Llama& m, int64_t ranks) {
  const int64_t head = m.hidden / m.heads;
  int64_t group = m.heads / m.kv_heads;
  while (m.kv_rank > 0 && !all_get_some(m.kv_heads, ranks)) ++m.kv_heads;
  while (m.kv_heads < ranks && ranks % m.kv_heads != 0) --m.kv_heads;
  while (m.kv_heads >= ranks && !all_get_some(m.kv_heads, ranks)) ++m.kv_heads;
  while (m.kv_heads < ranks && m.kv_heads * group % ranks != 0) ++group;
  m.heads = m.kv_heads * group;
  m.hidden = m.heads * head;
}

// Sizes that leave no rank along tp without a head or a token of the vocabulary, and none at all without a token.
void fit_to_parallel_ranks(Case& c) {
  const int64_t ranks = c.tensor_ranks();
  golden::Gpt& g = c.model.gpt;
  golden::Llama& m = c.model.llama;
  const int64_t head = g.hidden / g.heads;
  for (int64_t* size : {&g.heads, &g.vocab, &m.intermediate, &m.vocab})
    while (!all_get_some(*size, ranks)) ++*size;
  g.hidden = g.heads * head;
  fit_heads(m, ranks);
  Case with_sequence_parallelism = c;
  with_sequence_parallelism.options.sequence_parallel = 1;
  for (int64_t* length : {&g.positions, &m.positions})
    while (!sequence_fits(with_sequence_parallelism, *length)) ++*length;
}

// Every second case has few options, so that each also occurs without the others.
void generate_options(Chooser& choose, Case& c, uint64_t seed, int64_t index) {
  const double scale = choose.chance(0.5) ? 1 : 0.4;
  for (const OptionRow& row : option_rows()) {
    Chooser own(Draws(seed, row.key).at(index));
    Chooser& from = row.draws_apart ? own : choose;
    // Low precision beside a load is rare otherwise, and is where main parameters are lost.
    const bool rare = row.member == &CaseOptions::compute && std::ranges::any_of(c.steps, &StepPlan::loads);
    const bool draws = from.chance(rare ? 0.5 : row.probability * scale);
    const int64_t value = from.one_of(row.others);
    if (draws) try_change(c, [&] { row.of(c.options) = value; });
  }
}

std::vector<StepPlan> generate_history(Chooser& choose, const Case& c) {
  const bool exact = c.mode == Mode::exact;
  const int64_t few = exact ? 1 : choose.integer(1, c.mode == Mode::fast ? 2 : 4);
  const bool long_run = c.mode == Mode::canonical && choose.chance(0.2);
  std::vector<StepPlan> steps(static_cast<size_t>(long_run ? 10 : few));
  const bool accumulates = choose.chance(0.5), skips_sync = choose.chance(0.3), freezes = choose.chance(0.35);
  const bool changes_lr = choose.chance(0.35), by_hand = choose.chance(0.25), evaluates = choose.chance(0.25);
  const bool discards = !exact && choose.chance(0.2);
  for (StepPlan& step : steps) {
    if (accumulates) step.rounds = choose.one_of<int64_t>({1, 2, 3, 3, 4});
    if (c.model.llama.balance_over == golden::Llama::BalanceOver::step) step.rounds = 1;
    if (skips_sync) step.sync_every = choose.one_of<int64_t>({1, 2, 3});
    if (freezes && choose.chance(0.6)) step.frozen = choose.integer(1, 9);
    if (changes_lr) step.lr_percent = choose.one_of<int64_t>({100, 50, 0, 200});
    step.unshard = by_hand && choose.chance(0.6);
    step.eval = evaluates && choose.chance(0.6);
    step.discard = discards && choose.chance(0.6);
  }
  return steps;
}

// Saves, saves that die, and loads elsewhere, of one case in six.
void generate_checkpoints(Chooser choose, Case& c, const Limits& limits) {
  if (!choose.chance(1.0 / 6)) return;
  for (size_t s = 0; s < c.steps.size(); ++s) {
    StepPlan plan = c.steps[s];
    plan.save = choose.chance(s == 0 ? 0.8 : 0.4);
    plan.crash = choose.chance(0.3);
    c.steps[s] = plan;
    if (!choose.chance(0.6)) continue;
    const std::string strategy = limits.strategy.value_or(choose.one_of(shardproof::strategies()).name);
    if (choose.chance(0.6)) plan.load_strategy = strategy;
    const std::string& there = plan.load_strategy.empty() ? c.at(s).strategy : strategy;
    // Canonical arithmetic goes on anywhere, other parallel runs on a parallel mesh again.
    const bool parallel = c.microbatch_ranks() > 1 && (c.options.arithmetic == 0 || choose.chance(0.6));
    const Mesh mesh = parallel && !limits.mesh ? generate_parallel_mesh(choose, limits, there, c.model.of_tokens())
                                               : generate_mesh(choose, limits, there);
    if (plan.load_strategy.empty() || choose.chance(0.7)) plan.load_mesh = mesh;
    try_change(c, [&] { c.steps[s] = plan; });
  }
}

// Ranks above ten, of some cases that save: names of files, and of ranks, then have two digits. Axes cp and tp stay.
void try_wide_world(Chooser choose, Case& c, const Limits& limits) {
  constexpr int64_t kLeast = 11, kMost = 14;
  const bool saves = std::ranges::any_of(c.steps, &StepPlan::save);
  const int64_t inner = c.microbatch_ranks();
  if (!saves || !limits.above_ten || limits.mesh || !choose.chance(inner > 1 ? 0.4 : 0.15)) return;
  const int64_t outer = inner == 1 ? choose.integer(kLeast, kMost) : (kLeast + inner - 1) / inner;
  if (outer * inner > kMost) return;
  std::vector<shardproof::Axis> axes = {{axes::dp_shard, outer}};
  if (choose.chance(0.5) && outer % 2 == 0) axes = {{axes::dp_replicate, 2}, {axes::dp_shard, outer / 2}};
  for (const shardproof::Axis& axis : c.mesh.axes())
    if (axis.name == axes::cp || axis.name == axes::tp) axes.push_back(axis);
  try_change(c, [&] { c.mesh = Mesh(axes); });
}

// Other orders of the axes of some meshes, so that no order is taken for granted.
void try_other_orders(Chooser choose, Case& c, const Limits& limits) {
  if (limits.mesh) return;
  const auto try_order = [&](const auto& mesh_in) {
    const bool takes = choose.chance(0.3);
    const std::vector<Mesh> orders = in_other_orders(mesh_in(c));
    if (takes && !orders.empty()) try_change(c, [&] { mesh_in(c) = choose.one_of(orders); });
  };
  try_order([](Case& of) -> Mesh& { return of.mesh; });
  for (size_t s = 0; s < c.steps.size(); ++s)
    if (c.steps[s].load_mesh) try_order([s](Case& of) -> Mesh& { return *of.steps[s].load_mesh; });
}

// Behind all that draws meshes, for context parallelism cuts sequences. Not in the mode fast: equal tokens at the beginning of
// a sequence weigh the same but for roundings, which would say who stays.
void try_capacity(Chooser choose, Case& c) {
  if (c.model.kind != golden::Model::Kind::llama || c.model.llama.experts == 0 || c.mode == Mode::fast) return;
  if (!choose.chance(0.5)) return;
  try_change(c, [&] { c.model.llama.expert_capacity = choose.one_of<double>({0.5, 1, 1.25}); });
}

// Biases of routers that begin with values, as those of a trained model do.
void try_lean(Chooser choose, Case& c) {
  if (c.model.kind != golden::Model::Kind::llama || c.model.llama.experts < 2 || !choose.chance(0.25)) return;
  try_change(c, [&] { c.model.llama.expert_lean = choose.one_of<double>({-0.25, 0.125}); });
}

// In low precision and `fast` mode, where a tolerance has to judge.
void fit_to_roundings(Case& c) {
  c.optimizer.eps = 0.01;  // roundings are larger, as with cut layers
  // A rounding may put a value on the other side of the kink of relu: a whole sample then comes to a gradient or leaves it.
  if (c.model.mlp.activation == golden::Activation::relu) c.model.mlp.activation = golden::Activation::gelu;
  // Likewise it may choose another expert, unless a token has all of them.
  golden::Llama& m = c.model.llama;
  if (m.experts > 0) m.experts_per_token = m.experts, m.groups_per_token = m.expert_groups;
}

Case generate_tiny(Chooser& choose) {
  Case c;
  c.model.kind = golden::Model::Kind::mlp;
  const int64_t layers = choose.integer(1, 4);
  for (int64_t i = 0; i <= layers; ++i) c.model.mlp.widths.push_back(choose.integer(1, 32));
  c.mesh = Mesh({{axes::dp_shard, 4}});
  c.strategy = "zero3";
  c.options.units = units_leaf;
  c.optimizer = {.kind = golden::Optimizer::Kind::adamw, .lr = 0.01, .weight_decay = 0.01};
  c.steps = {3, StepPlan{}};
  return c;
}

}  // namespace

Case generate(uint64_t seed, int64_t index, const Limits& limits) {
  Chooser choose(Draws(seed, "case").at(index));
  Case c;
  if (limits.tiny) {
    c = generate_tiny(choose);
  } else {
    using enum Mode;
    // Tensor and context parallelism cut sums inside of models: for modes in which that leaves no trace, or is judged.
    const bool given = limits.mesh && (limits.mesh->has(axes::tp) || limits.mesh->has(axes::cp));
    c.mode = limits.mode.value_or(
        given ? choose.one_of<Mode>({exact, canonical, fast})
              : choose.one_of<Mode>({exact, exact, ordered, ordered, ordered, ordered, canonical, canonical, fast, fast}));
    if (given && limits.mesh->has(axes::cp) && !limits.mode && c.mode == exact) c.mode = fast;
    c.strategy = limits.strategy.value_or(choose.one_of(strategies_on(limits.mesh, c.mode)));
    if (Chooser own(Draws(seed, "free rows").at(index)); !limits.strategy && own.chance(0.15))
      c.strategy = own.one_of(names_on(limits.mesh, c.mode, shardproof::free_rows()));
    const bool parallel = given || (!limits.mesh && c.mode != ordered && choose.chance(0.65));
    const bool with_context = given && limits.mesh->has(axes::cp);
    c.model = with_context ? generate_language_model(choose, c.mode) : generate_model(choose, c.mode, parallel);
    generate_family(Chooser(Draws(seed, "family").at(index)), c.model);
    generate_latents(Chooser(Draws(seed, "latents").at(index)), c.model, c.mode);
    generate_sight(Chooser(Draws(seed, "sight").at(index)), c.model, c.mode);
    c.mesh = parallel && !given ? generate_parallel_mesh(choose, limits, c.strategy, c.model.of_tokens())
                                : generate_mesh(choose, limits, c.strategy);
    generate_optimizer(choose, c);
    if (c.microbatch_ranks() > 1) {
      fit_to_parallel_ranks(c);
      // Kernels on cut sizes round more differently than sums over ranks do; Adam's first step makes that of a tiny gradient a
      // whole step, unless eps is well above it.
      if (c.mode == fast) c.optimizer.eps = 0.01;
      if (c.mode == canonical) {
        c.options.arithmetic = 1;
        c.model.gpt.tanh_gelu = false;
        if (c.optimizer.kind == golden::Optimizer::Kind::muon && c.tensor_ranks() > 1)
          c.optimizer.kind = golden::Optimizer::Kind::adamw;
      }
      if (c.mode == fast && choose.chance(0.2)) c.options.compute = choose.one_of<int64_t>({bf16, bf16, fp16});
    }
    generate_experts(Chooser(Draws(seed, "experts").at(index)), c);
    // What the rest of the case needs.
    if (c.mode == canonical) c.options.loss = loss_sum;
    if (c.optimizer.kind == golden::Optimizer::Kind::muon && c.strategy != "ddp") c.options.set("granularity", "tensor");
    c.steps = generate_history(choose, c);
    generate_checkpoints(Chooser(Draws(seed, "checkpoints").at(index)), c, limits);
    try_wide_world(Chooser(Draws(seed, "wide").at(index)), c, limits);
    try_other_orders(Chooser(Draws(seed, "order of axes").at(index)), c, limits);
    generate_options(choose, c, seed, index);
    bring_together(Chooser(Draws(seed, "together").at(index)), c);
    mix(Chooser(Draws(seed, "mix").at(index)), c, limits);
    try_capacity(Chooser(Draws(seed, "capacity").at(index)), c);
    try_lean(Chooser(Draws(seed, "lean").at(index)), c);
    if (c.mode == fast && c.options.compute != fp32) fit_to_roundings(c);
    bound_work(Chooser(Draws(seed, "work").at(index)), c);
  }
  c.seed = choose.bits() % 1'000'000;
  return c;
}

}  // namespace harness
