#include "harness/run/verdict.h"

#include <fmt/format.h>

#include "harness/run/message.h"

namespace harness {
namespace {

// In the order of Outcome.
constexpr const char* kNames[] = {"held", "values", "property", "schedule", "control", "error", "crash", "diverged"};

const char* name_of(Verdict::Outcome outcome) {
  return kNames[static_cast<size_t>(outcome)];
}

}  // namespace

std::string Verdict::kind() const {
  return origin.empty() ? name_of(outcome) : fmt::format("{} {}", name_of(outcome), origin);
}

std::string Verdict::str() const {
  switch (outcome) {
    case Outcome::held:
      return "";
    case Outcome::values:
      return fmt::format("step {}: {}", step + 1, difference.str());
    case Outcome::property:
      return fmt::format("property {}: {}", origin, says);
    case Outcome::crash:
      return fmt::format("crash ({})", origin);
    default:
      return fmt::format("{}: {}", name_of(outcome), says);
  }
}

Verdict held_verdict() {
  return {.outcome = Verdict::Outcome::held};
}

Verdict verdict_on(const std::exception& error) {
  return {.outcome = Verdict::Outcome::error, .origin = origin_of(error), .says = message_of(error)};
}

bool fails_alike(const Verdict& one, const Verdict& other) {
  return !one.held() && one.kind() == other.kind() && one.difference.value == other.difference.value;
}

}  // namespace harness
