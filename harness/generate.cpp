#include "harness/generate.h"

#include <cmath>

#include "harness/random.h"
#include "shardproof/strategy.h"

namespace harness {
namespace {

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

// Layer norm over a few features turns rounding into values, which no tolerance can judge: `head_min` keeps clear of that.
golden::Model generate_gpt(Chooser& choose, int64_t head_min) {
  golden::Model model;
  model.kind = golden::Model::Kind::gpt;
  golden::Gpt& g = model.gpt;
  g.layers = choose.chance(0.6) ? 1 : choose.integer(2, 3);
  g.heads = choose.integer(1, 3);
  g.hidden = g.heads * choose.integer(head_min, 8);
  g.vocab = choose.integer(2, 37);
  g.positions = choose.integer(1, 9);
  g.tied = choose.chance(0.4);
  if (choose.chance(0.03)) {
    // Large enough that kernels take the paths of real models: one of them rounded differently only here.
    g.hidden = g.heads * choose.integer(16, 48);
    g.vocab = choose.integer(100, 300);
    g.positions = choose.integer(32, 70);
  }
  return model;
}

void generate_optimizer(Chooser& choose, Case& c) {
  golden::Optimizer& o = c.optimizer;
  const bool decays = choose.chance(0.4);
  if (choose.chance(0.5)) {
    o.kind = golden::Optimizer::Kind::sgd;
    o.lr = choose.one_of<double>({0.01, 0.1, 0.3});
    if (choose.chance(0.5)) o.momentum = choose.one_of<double>({0.5, 0.9});
    if (decays) o.weight_decay = choose.one_of<double>({0.01, 0.1});
  } else {
    o.kind = golden::Optimizer::Kind::adamw;
    o.lr = choose.one_of<double>({0.001, 0.01, 0.1});
    if (choose.chance(0.3)) o.beta1 = choose.one_of<double>({0, 0.5, 0.8});
    if (choose.chance(0.3)) o.beta2 = choose.one_of<double>({0.5, 0.9, 0.95});
    if (choose.chance(0.2)) o.eps = 1e-6;
    if (decays) o.weight_decay = choose.one_of<double>({0.01, 0.1});
  }
  // Norms of generated gradients spread around 1: a third of these clips bites, the rest does not.
  if (choose.chance(0.4)) c.clip_norm = std::ldexp(1.0, static_cast<int>(choose.integer(-5, 6)));
}

void generate_strategy(Chooser& choose, const Limits& limits, Case& c) {
  c.strategy = limits.strategy.value_or(choose.one_of(shardproof::strategies()).name);
  c.units = choose.one_of<Units>({Units::root, Units::block, Units::leaf, Units::some});
  if (choose.chance(0.25)) c.bucket_bytes_max = choose.one_of<int64_t>({64, 256, 1000, 4096});
  if (choose.chance(0.2)) c.reshard_after_forward = false;
  c.alignment_bytes = choose.one_of<int64_t>({64, 64, 128, 512});
  c.mean_over_ranks = choose.chance(0.7);
}

std::vector<int64_t> generate_history(Chooser& choose, int64_t steps_max) {
  std::vector<int64_t> rounds;
  const int64_t steps = choose.integer(1, steps_max);
  const bool accumulates = choose.chance(0.5);
  for (int64_t i = 0; i < steps; ++i) rounds.push_back(accumulates ? choose.one_of<int64_t>({1, 2, 3, 3, 4}) : 1);
  return rounds;
}

Case generate_tiny(Chooser& choose) {
  Case c;
  c.model.kind = golden::Model::Kind::mlp;
  const int64_t layers = choose.integer(1, 4);
  for (int64_t i = 0; i <= layers; ++i) c.model.mlp.widths.push_back(choose.integer(1, 32));
  c.mesh = shardproof::Mesh({{"dp_shard", 4}});
  c.strategy = "zero3";
  c.units = Units::leaf;
  c.optimizer = {.kind = golden::Optimizer::Kind::adamw, .lr = 0.01, .weight_decay = 0.01};
  c.rounds = {1, 1, 1};
  return c;
}

}  // namespace

Case generate(uint64_t seed, int64_t index, const Limits& limits) {
  Chooser choose(Draws(seed, "case").at(index));
  Case c;
  if (limits.tiny) {
    c = generate_tiny(choose);
  } else {
    c.mode = limits.mode.value_or(
        choose.one_of<Mode>({Mode::exact, Mode::ordered, Mode::ordered, Mode::ordered, Mode::fast}));
    const bool exact = c.mode == Mode::exact;
    c.model = exact || choose.chance(0.5) ? generate_mlp(choose, exact) : generate_gpt(choose, c.mode == Mode::fast ? 4 : 1);
    c.mesh = limits.mesh.value_or(shardproof::Mesh({{"dp_shard", choose.integer(1, limits.world_max)}}));
    generate_strategy(choose, limits, c);
    generate_optimizer(choose, c);
    c.rounds = generate_history(choose, exact ? 1 : c.mode == Mode::fast ? 2 : 4);
  }
  c.seed = choose.bits() % 1'000'000;
  return c;
}

}  // namespace harness
