#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "harness/case/case.h"
#include "harness/case/case_scanner.h"
#include "shardproof/algebra/strategy.h"
#include "shardproof/base/check.h"

namespace harness {
namespace {

using Argument = Scanner::Argument;

constexpr int64_t kStepsMax = 100'000;  // of one command: a slip of the finger must not fill the memory
constexpr int64_t kRoundsMax = 100'000;

template <class Value>
Value choose(const Scanner& scanner, const Argument& argument, const std::vector<std::pair<std::string, Value>>& choices) {
  std::vector<std::string> names;
  for (const auto& [name, value] : choices) {
    if (argument.value == name) return value;
    names.push_back(name);
  }
  scanner.fail(argument.value_column, fmt::format("{}={}", argument.key, fmt::join(names, "|")));
}

[[noreturn]] void unknown(const Scanner& scanner, const Argument& argument, const char* known) {
  scanner.fail(argument.column, fmt::format("one of {}, not '{}'", known, argument.key));
}

void read_mlp(const Scanner& scanner, const Argument& a, golden::Mlp& mlp) {
  using enum golden::Activation;
  if (a.key == "widths") mlp.widths = scanner.integers(a);
  else if (a.key == "act")
    mlp.activation =
        choose<golden::Activation>(scanner, a, {{"identity", identity}, {"relu", relu}, {"tanh", tanh}, {"gelu", gelu}});
  else if (a.key == "bias") mlp.bias = scanner.flag(a);
  else unknown(scanner, a, "widths, act, bias");
}

void read_gpt(const Scanner& scanner, const Argument& a, golden::Gpt& gpt) {
  if (a.key == "layers") gpt.layers = scanner.integer(a);
  else if (a.key == "hidden") gpt.hidden = scanner.integer(a);
  else if (a.key == "heads") gpt.heads = scanner.integer(a);
  else if (a.key == "vocab") gpt.vocab = scanner.integer(a);
  else if (a.key == "positions") gpt.positions = scanner.integer(a);
  else if (a.key == "tied") gpt.tied = scanner.flag(a);
  else if (a.key == "dropout") gpt.dropout = scanner.number(a);
  else unknown(scanner, a, "layers, hidden, heads, vocab, positions, tied, dropout");
}

void read_llama(const Scanner& scanner, const Argument& a, golden::Llama& llama) {
  if (a.key == "layers") llama.layers = scanner.integer(a);
  else if (a.key == "hidden") llama.hidden = scanner.integer(a);
  else if (a.key == "heads") llama.heads = scanner.integer(a);
  else if (a.key == "kv_heads") llama.kv_heads = scanner.integer(a);
  else if (a.key == "intermediate") llama.intermediate = scanner.integer(a);
  else if (a.key == "vocab") llama.vocab = scanner.integer(a);
  else if (a.key == "positions") llama.positions = scanner.integer(a);
  else if (a.key == "tied") llama.tied = scanner.flag(a);
  else if (a.key == "dropout") llama.dropout = scanner.number(a);
  else if (a.key == "qk_norm") llama.qk_norm = scanner.flag(a);
  else unknown(scanner, a, "layers, hidden, heads, kv_heads, intermediate, vocab, positions, tied, dropout, qk_norm");
}

void read_conv(const Scanner& scanner, const Argument& a, golden::Conv& conv) {
  if (a.key == "channels") conv.channels = scanner.integers(a);
  else if (a.key == "kernel") conv.kernel = scanner.integer(a);
  else if (a.key == "size") conv.size = scanner.integer(a);
  else if (a.key == "classes") conv.classes = scanner.integer(a);
  else if (a.key == "norm") conv.norm = scanner.flag(a);
  else unknown(scanner, a, "channels, kernel, size, classes, norm");
}

void read_odd(const Scanner& scanner, const Argument& a, golden::Odd& odd) {
  if (a.key == "width") odd.width = scanner.integer(a);
  else if (a.key == "calls") odd.calls = scanner.integer(a);
  else if (a.key == "gain") odd.gain = scanner.flag(a);
  else if (a.key == "cube") odd.cube = scanner.flag(a);
  else if (a.key == "empty") odd.empty = scanner.flag(a);
  else if (a.key == "side") odd.side = scanner.flag(a);
  else if (a.key == "never") odd.never = scanner.flag(a);
  else if (a.key == "tied") odd.tied = scanner.flag(a);
  else unknown(scanner, a, "width, calls, gain, cube, empty, side, never, tied");
}

golden::Model read_model(Scanner& scanner) {
  using Kind = golden::Model::Kind;
  constexpr const char* kModels = "a model, gpt(...), llama(...), mlp(...), conv(...) or odd(...)";
  golden::Model model;
  scanner.skip_spaces();
  const size_t column = scanner.column();
  const std::string kind = scanner.word(kModels);
  bool known = false;
  for (const Kind candidate : {Kind::mlp, Kind::gpt, Kind::conv, Kind::odd, Kind::llama})
    if (kind == to_string(candidate)) model.kind = candidate, known = true;
  if (!known) scanner.fail(column, fmt::format("{}, not '{}'", kModels, kind));
  for (const Argument& a : scanner.arguments()) {
    switch (model.kind) {
      case Kind::mlp: read_mlp(scanner, a, model.mlp); break;
      case Kind::gpt: read_gpt(scanner, a, model.gpt); break;
      case Kind::conv: read_conv(scanner, a, model.conv); break;
      case Kind::odd: read_odd(scanner, a, model.odd); break;
      case Kind::llama: read_llama(scanner, a, model.llama); break;
    }
  }
  return model;
}

shardproof::Mesh read_axes(Scanner& scanner, size_t column) {
  std::vector<shardproof::Axis> axes;
  for (const Argument& a : scanner.arguments()) axes.push_back({a.key, scanner.integer(a)});
  try {
    return shardproof::Mesh(std::move(axes));
  } catch (const shardproof::Error& error) {
    scanner.fail(column, fmt::format("a mesh: {}", error.what()));
  }
}

shardproof::Mesh read_mesh(Scanner& scanner) {
  scanner.skip_spaces();
  const size_t column = scanner.column();
  if (scanner.word("mesh(axis=size,...)") != "mesh") scanner.fail(column, "mesh(axis=size,...)");
  return read_axes(scanner, column);
}

std::string read_strategy_name(Scanner& scanner) {
  scanner.skip_spaces();
  const size_t column = scanner.column();
  const std::string name = scanner.word("a strategy");
  try {
    shardproof::strategy(name);
  } catch (const shardproof::Error& error) {
    scanner.fail(column, fmt::format("a strategy ({})", error.what()));
  }
  return name;
}

void read_strategy(Scanner& scanner, Case& c) {
  c.strategy = read_strategy_name(scanner);
  for (const Argument& a : scanner.arguments()) {
    const auto& rows = option_rows();
    const auto row = std::find_if(rows.begin(), rows.end(), [&](const OptionRow& r) { return a.key == r.key; });
    if (row == rows.end()) {
      std::vector<std::string> keys;
      for (const OptionRow& known : rows) keys.push_back(known.key);
      unknown(scanner, a, fmt::format("{}", fmt::join(keys, ", ")).c_str());
    }
    if (row->names.empty()) {
      c.options.*row->member = scanner.integer(a);
      continue;
    }
    std::vector<std::pair<std::string, int64_t>> choices;
    for (size_t i = 0; i < row->names.size(); ++i) choices.emplace_back(row->names[i], static_cast<int64_t>(i));
    c.options.*row->member = choose<int64_t>(scanner, a, choices);
  }
}

void read_optimizer(Scanner& scanner, Case& c) {
  using Kind = golden::Optimizer::Kind;
  scanner.skip_spaces();
  const size_t column = scanner.column();
  const std::string kind = scanner.word("an optimizer, sgd(...) or adamw(...)");
  golden::Optimizer& o = c.optimizer;
  std::vector<std::string> names;
  for (const Kind known : optimizer_kinds()) {
    names.push_back(fmt::format("{}(...)", to_string(known)));
    if (kind == to_string(known)) o.kind = known, names.clear();
    if (names.empty()) break;
  }
  if (!names.empty()) scanner.fail(column, fmt::format("{}, not '{}'", fmt::join(names, ", "), kind));
  const bool has_momentum = o.kind == Kind::sgd || o.kind == Kind::muon, has_betas = o.kind != Kind::sgd;
  for (const Argument& a : scanner.arguments()) {
    if (a.key == "lr") o.lr = scanner.number(a);
    else if (a.key == "decay") o.weight_decay = scanner.number(a);
    else if (a.key == "groups") c.groups = scanner.integer(a);
    else if (a.key == "clip") c.clip_norm = scanner.number(a);
    else if (a.key == "norm") c.norm_order = choose<int64_t>(scanner, a, {{"1", 1}, {"2", 2}, {"inf", 0}});
    else if (has_momentum && a.key == "momentum") o.momentum = scanner.number(a);
    else if (o.kind == Kind::sgd && a.key == "nesterov") o.nesterov = scanner.flag(a);
    else if (has_betas && a.key == "beta1") o.beta1 = scanner.number(a);
    else if (has_betas && a.key == "beta2") o.beta2 = scanner.number(a);
    else if (has_betas && a.key == "eps") o.eps = scanner.number(a);
    else unknown(scanner, a, has_betas ? (has_momentum ? "lr, momentum, beta1, beta2, eps, decay, groups, clip, norm"
                                                       : "lr, beta1, beta2, eps, decay, groups, clip, norm")
                                       : "lr, momentum, nesterov, decay, groups, clip, norm");
  }
}

void read_mode_and_seed(Scanner& scanner, Case& c) {
  constexpr const char* kModes = "a mode, exact, ordered, canonical or fast";
  scanner.skip_spaces();
  size_t column = scanner.column();
  const std::string mode = scanner.word(kModes);
  bool known = false;
  for (const Mode candidate : modes())
    if (mode == to_string(candidate)) c.mode = candidate, known = true;
  if (!known) scanner.fail(column, fmt::format("{}, not '{}'", kModes, mode));
  scanner.skip_spaces();
  column = scanner.column();
  if (scanner.word("seed=N") != "seed") scanner.fail(column, "seed=N");
  scanner.expect('=', "after seed");
  c.seed = static_cast<uint64_t>(scanner.integer("a number below 2^63"));
}

// "(N)" after a word that holds until it changes.
int64_t read_setting(Scanner& scanner, const std::string& word, int64_t least, int64_t most) {
  scanner.expect('(', fmt::format("after {}", word).c_str());
  const size_t at = scanner.column();
  const int64_t value = scanner.integer(word == "accumulate" ? "a number of rounds" : "a number");
  if (value < least || value > most)
    scanner.fail(at, fmt::format("{} to {}{}", least, most, word == "accumulate" ? " rounds" : ""));
  scanner.expect(')', "after the number");
  return value;
}

// "@mesh(...)" or "@strategy(...)" after load.
void read_load(Scanner& scanner, StepPlan& plan) {
  scanner.expect('@', "after load, as in load@mesh(dp_shard=2)");
  const size_t column = scanner.column();
  const std::string what = scanner.word("mesh(...) or strategy(...)");
  if (what == "mesh") {
    plan.load_mesh = read_axes(scanner, column);
    return;
  }
  if (what != "strategy") scanner.fail(column, fmt::format("mesh(...) or strategy(...), not '{}'", what));
  scanner.expect('(', "after strategy");
  plan.load_strategy = read_strategy_name(scanner);
  scanner.expect(')', "after the strategy");
}

StepPlan without_events(StepPlan plan) {
  return {.rounds = plan.rounds, .sync_every = plan.sync_every, .frozen = plan.frozen, .lr_percent = plan.lr_percent};
}

void read_history(Scanner& scanner, Case& c) {
  constexpr const char* kWords =
      "step, step*N, accumulate(N), sync(N), freeze(N), lr(PERCENT), eval, discard, unshard, save, crash-during-save, "
      "load@mesh(...) or load@strategy(...)";
  scanner.skip_spaces();
  scanner.expect(':', "before the history");
  c.steps.clear();
  StepPlan plan;
  while (!scanner.at_end()) {
    const size_t column = scanner.column();
    const std::string word = scanner.word(kWords);
    if (word == "accumulate") plan.rounds = read_setting(scanner, word, 1, kRoundsMax);
    else if (word == "sync") plan.sync_every = read_setting(scanner, word, 1, kRoundsMax);
    else if (word == "freeze") plan.frozen = read_setting(scanner, word, 0, kRoundsMax);
    else if (word == "lr") plan.lr_percent = read_setting(scanner, word, 0, kRoundsMax);
    else if (word == "eval") plan.eval = true;
    else if (word == "discard") plan.discard = true;
    else if (word == "unshard") plan.unshard = true;
    else if (word == "save") plan.save = true;
    else if (word == "crash") {
      for (const char c : std::string("-during-save")) scanner.expect(c, "as in crash-during-save");
      plan.crash = true;
    }
    else if (word == "load") read_load(scanner, plan);
    else if (word == "step") {
      const int64_t times = scanner.accept('*') ? scanner.integer("a number of steps") : 1;
      if (times < 1 || times > kStepsMax) scanner.fail(column, fmt::format("1 to {} steps", kStepsMax));
      for (int64_t i = 0; i < times; ++i) {
        c.steps.push_back(plan);
        plan = without_events(plan);
      }
    } else {
      scanner.fail(column, fmt::format("{}, not '{}'", kWords, word));
    }
  }
}

}  // namespace

golden::Model parse_model(std::string_view text) {
  Scanner scanner(text);
  const golden::Model model = read_model(scanner);
  if (!scanner.at_end()) scanner.fail(scanner.column(), "the end of the model");
  validate(model);
  return model;
}

Case Case::parse(std::string_view text) {
  Scanner scanner(text);
  Case c;
  c.model = read_model(scanner);
  c.mesh = read_mesh(scanner);
  read_strategy(scanner, c);
  read_optimizer(scanner, c);
  read_mode_and_seed(scanner, c);
  read_history(scanner, c);
  validate(c);
  return c;
}

}  // namespace harness
