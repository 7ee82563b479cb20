#include <fmt/format.h>
#include <fmt/ranges.h>

#include "harness/case.h"
#include "harness/case_scanner.h"
#include "shardproof/check.h"
#include "shardproof/strategy.h"

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

golden::Model read_model(Scanner& scanner) {
  golden::Model model;
  scanner.skip_spaces();
  const size_t column = scanner.column();
  const std::string kind = scanner.word("a model, gpt(...) or mlp(...)");
  if (kind == "mlp") {
    model.kind = golden::Model::Kind::mlp;
    for (const Argument& a : scanner.arguments()) {
      using enum golden::Activation;
      if (a.key == "widths") model.mlp.widths = scanner.integers(a);
      else if (a.key == "act")
        model.mlp.activation = choose<golden::Activation>(
            scanner, a, {{"identity", identity}, {"relu", relu}, {"tanh", tanh}, {"gelu", gelu}});
      else if (a.key == "bias") model.mlp.bias = scanner.flag(a);
      else unknown(scanner, a, "widths, act, bias");
    }
    return model;
  }
  if (kind != "gpt") scanner.fail(column, fmt::format("a model, gpt(...) or mlp(...), not '{}'", kind));
  model.kind = golden::Model::Kind::gpt;
  for (const Argument& a : scanner.arguments()) {
    if (a.key == "layers") model.gpt.layers = scanner.integer(a);
    else if (a.key == "hidden") model.gpt.hidden = scanner.integer(a);
    else if (a.key == "heads") model.gpt.heads = scanner.integer(a);
    else if (a.key == "vocab") model.gpt.vocab = scanner.integer(a);
    else if (a.key == "positions") model.gpt.positions = scanner.integer(a);
    else if (a.key == "tied") model.gpt.tied = scanner.flag(a);
    else unknown(scanner, a, "layers, hidden, heads, vocab, positions, tied");
  }
  return model;
}

shardproof::Mesh read_mesh(Scanner& scanner) {
  scanner.skip_spaces();
  const size_t column = scanner.column();
  if (scanner.word("mesh(axis=size,...)") != "mesh") scanner.fail(column, "mesh(axis=size,...)");
  std::vector<shardproof::Axis> axes;
  for (const Argument& a : scanner.arguments()) axes.push_back({a.key, scanner.integer(a)});
  try {
    return shardproof::Mesh(std::move(axes));
  } catch (const shardproof::Error& error) {
    scanner.fail(column, fmt::format("a mesh: {}", error.what()));
  }
}

void read_strategy(Scanner& scanner, Case& c) {
  scanner.skip_spaces();
  const size_t column = scanner.column();
  c.strategy = scanner.word("a strategy");
  try {
    shardproof::strategy(c.strategy);
  } catch (const shardproof::Error& error) {
    scanner.fail(column, fmt::format("a strategy ({})", error.what()));
  }
  for (const Argument& a : scanner.arguments()) {
    if (a.key == "units")
      c.units = choose<Units>(scanner, a, {{"root", Units::root}, {"block", Units::block}, {"leaf", Units::leaf},
                                           {"some", Units::some}});
    else if (a.key == "bucket") c.bucket_bytes_max = scanner.integer(a);
    else if (a.key == "reshard") c.reshard_after_forward = scanner.flag(a);
    else if (a.key == "align") c.alignment_bytes = scanner.integer(a);
    else if (a.key == "loss") c.mean_over_ranks = choose<bool>(scanner, a, {{"mean", true}, {"sum", false}});
    else unknown(scanner, a, "units, bucket, reshard, align, loss");
  }
}

void read_optimizer(Scanner& scanner, Case& c) {
  scanner.skip_spaces();
  const size_t column = scanner.column();
  const std::string kind = scanner.word("an optimizer, sgd(...) or adamw(...)");
  const bool adam = kind == "adamw";
  if (!adam && kind != "sgd") scanner.fail(column, fmt::format("sgd(...) or adamw(...), not '{}'", kind));
  golden::Optimizer& o = c.optimizer;
  o.kind = adam ? golden::Optimizer::Kind::adamw : golden::Optimizer::Kind::sgd;
  for (const Argument& a : scanner.arguments()) {
    if (a.key == "lr") o.lr = scanner.number(a);
    else if (a.key == "decay") o.weight_decay = scanner.number(a);
    else if (a.key == "clip") c.clip_norm = scanner.number(a);
    else if (!adam && a.key == "momentum") o.momentum = scanner.number(a);
    else if (adam && a.key == "beta1") o.beta1 = scanner.number(a);
    else if (adam && a.key == "beta2") o.beta2 = scanner.number(a);
    else if (adam && a.key == "eps") o.eps = scanner.number(a);
    else unknown(scanner, a, adam ? "lr, beta1, beta2, eps, decay, clip" : "lr, momentum, decay, clip");
  }
}

void read_mode_and_seed(Scanner& scanner, Case& c) {
  scanner.skip_spaces();
  size_t column = scanner.column();
  const std::string mode = scanner.word("a mode, exact, ordered or fast");
  if (mode == "exact") c.mode = Mode::exact;
  else if (mode == "ordered") c.mode = Mode::ordered;
  else if (mode == "fast") c.mode = Mode::fast;
  else scanner.fail(column, fmt::format("a mode, exact, ordered or fast, not '{}'", mode));
  scanner.skip_spaces();
  column = scanner.column();
  if (scanner.word("seed=N") != "seed") scanner.fail(column, "seed=N");
  scanner.expect('=', "after seed");
  c.seed = static_cast<uint64_t>(scanner.integer("a number below 2^63"));
}

void read_history(Scanner& scanner, Case& c) {
  scanner.skip_spaces();
  scanner.expect(':', "before the history");
  c.rounds.clear();
  int64_t rounds = 1;
  while (!scanner.at_end()) {
    const size_t column = scanner.column();
    const std::string command = scanner.word("step, step*N or accumulate(N)");
    if (command == "accumulate") {
      scanner.expect('(', "after accumulate");
      const size_t at = scanner.column();
      rounds = scanner.integer("a number of rounds");
      if (rounds < 1 || rounds > kRoundsMax) scanner.fail(at, fmt::format("1 to {} rounds", kRoundsMax));
      scanner.expect(')', "after the number of rounds");
    } else if (command == "step") {
      const int64_t times = scanner.accept('*') ? scanner.integer("a number of steps") : 1;
      if (times < 1 || times > kStepsMax) scanner.fail(column, fmt::format("1 to {} steps", kStepsMax));
      c.rounds.insert(c.rounds.end(), static_cast<size_t>(times), rounds);
    } else {
      scanner.fail(column, fmt::format("step, step*N or accumulate(N), not '{}'", command));
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
