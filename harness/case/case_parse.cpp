#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "harness/case/case.h"
#include "harness/case/case_scanner.h"
#include "harness/case/model_fields.h"
#include "shardproof/algebra/strategy.h"
#include "shardproof/base/check.h"

namespace harness {
namespace {

using Argument = Scanner::Argument;

constexpr int64_t kStepsMax = 100'000;  // of one command: a slip of the finger must not fill the memory
constexpr int64_t kRoundsMax = 100'000;

[[noreturn]] void unknown(const Scanner& scanner, const Argument& argument, const std::vector<std::string>& known) {
  scanner.fail(argument.column, fmt::format("one of {}, not '{}'", fmt::join(known, ", "), argument.key));
}

// The row of a table with the argument's key.
template <class Row>
const Row& find_row(const Scanner& scanner, const Argument& argument, const std::vector<Row>& rows) {
  std::vector<std::string> keys;
  for (const Row& row : rows) {
    if (argument.key == row.key) return row;
    keys.push_back(row.key);
  }
  unknown(scanner, argument, keys);
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
  for (const Argument& a : scanner.arguments()) find_row(scanner, a, model_fields(model.kind)).read(model, scanner, a);
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
    const OptionRow& row = find_row(scanner, a, option_rows());
    row.of(c.options) =
        row.names.empty() ? scanner.integer(a) : static_cast<int64_t>(scanner.choice(a, {row.names.begin(), row.names.end()}));
  }
}

std::vector<std::string> fields_of(golden::Optimizer::Kind kind) {
  using enum golden::Optimizer::Kind;
  if (kind == sgd) return {"lr", "momentum", "nesterov", "decay", "groups", "clip", "norm"};
  if (kind == muon) return {"lr", "momentum", "beta1", "beta2", "eps", "decay", "groups", "clip", "norm"};
  return {"lr", "beta1", "beta2", "eps", "decay", "groups", "clip", "norm"};
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
    else if (a.key == "norm") c.norm_order = (static_cast<int64_t>(scanner.choice(a, {"1", "2", "inf"})) + 1) % 3;
    else if (has_momentum && a.key == "momentum") o.momentum = scanner.number(a);
    else if (o.kind == Kind::sgd && a.key == "nesterov") o.nesterov = scanner.flag(a);
    else if (has_betas && a.key == "beta1") o.beta1 = scanner.number(a);
    else if (has_betas && a.key == "beta2") o.beta2 = scanner.number(a);
    else if (has_betas && a.key == "eps") o.eps = scanner.number(a);
    else unknown(scanner, a, fields_of(o.kind));
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

// "threads(...)", if it is there.
void read_threads(Scanner& scanner, Case& c) {
  if (!scanner.comes('t')) return;
  const size_t column = scanner.column();
  if (scanner.word("threads(...)") != "threads") scanner.fail(column, "threads(...), or ':' before the history");
  c.interleaving = read_interleaving(scanner, scanner.arguments(), column);
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
  read_threads(scanner, c);
  read_history(scanner, c);
  validate(c);
  return c;
}

}  // namespace harness
