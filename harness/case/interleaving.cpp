#include "harness/case/interleaving.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

namespace harness {
namespace {

constexpr int64_t kDepthMax = 20;
constexpr int64_t kStepsMax = int64_t{1} << 40;

int64_t between(const Scanner& scanner, const Scanner::Argument& argument, int64_t least, int64_t most) {
  const int64_t value = scanner.integer(argument);
  if (value < least || value > most)
    scanner.fail(argument.value_column, fmt::format("{} between {} and {}", argument.key, least, most));
  return value;
}

}  // namespace

std::string Interleaving::str() const {
  switch (kind) {
    case Kind::eager:
      return "threads(eager)";
    case Kind::latest:
      return "threads(latest)";
    case Kind::random:
      return fmt::format("threads(random={})", seed);
    case Kind::pct:
      return fmt::format("threads(pct={},depth={},steps={})", seed, depth, steps);
    case Kind::choices:
      return fmt::format("threads(choices={})", fmt::join(choices, "-"));
  }
  return "?";
}

Interleaving read_interleaving(const Scanner& scanner, const std::vector<Scanner::Argument>& arguments, size_t column) {
  using Kind = Interleaving::Kind;
  constexpr const char* kKinds = "threads(eager), (latest), (random=SEED), (pct=SEED,depth=D,steps=K) or (choices=0-1-...)";
  if (arguments.empty()) scanner.fail(column, kKinds);
  const Scanner::Argument& first = arguments[0];
  Interleaving read;
  if (first.key == "eager" && !first.has_value) {
    read.kind = Kind::eager;
  } else if (first.key == "latest" && !first.has_value) {
    read.kind = Kind::latest;
  } else if (first.key == "random" || first.key == "pct") {
    read.kind = first.key == "pct" ? Kind::pct : Kind::random;
    read.seed = static_cast<uint64_t>(between(scanner, first, 0, INT64_MAX));
  } else if (first.key == "choices") {
    read.kind = Kind::choices;
    read.choices = scanner.integers(first);
    if (std::ranges::any_of(read.choices, [](int64_t choice) { return choice < 0; }))
      scanner.fail(first.value_column, "choices from 0 on");
  } else {
    scanner.fail(first.column, kKinds);
  }
  for (auto argument = arguments.begin() + 1; argument != arguments.end(); ++argument) {
    if (read.kind == Kind::pct && argument->key == "depth")
      read.depth = between(scanner, *argument, 1, kDepthMax);
    else if (read.kind == Kind::pct && argument->key == "steps")
      read.steps = between(scanner, *argument, 1, kStepsMax);
    else
      scanner.fail(argument->column, read.kind == Kind::pct ? "depth or steps" : "nothing after the first argument");
  }
  return read;
}

}  // namespace harness
