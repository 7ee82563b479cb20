#include "harness/commands/findings.h"

#include <chrono>
#include <utility>

#include "harness/commands/causes.h"

namespace harness {
namespace {

constexpr int64_t kAlikeKept = 100;  // of one cause; the others are in --json

}  // namespace

Findings::Findings(const VerifyOptions& options, const std::atomic<bool>& interrupted, Judge& judge,
                   std::function<void(const nlohmann::json&)> tell)
    : options_(options),
      interrupted_(interrupted),
      judge_(judge),
      tell_(std::move(tell)),
      database_(options.failures_directory) {}

void Findings::add(const Case& c, const Verdict& verdict, int64_t cases) {
  if (Failure* const known = known_cause(c, verdict.kind())) return add_alike(c, verdict, *known);
  const Shrunk found = shrunk(c, verdict);
  if (Failure* const known = known_cause(found.minimal, found.verdict.kind())) return add_alike(c, verdict, *known);
  add_failure(c, found, cases);
}

Failure* Findings::known_cause(const Case& c, const std::string& kind) {
  const auto judged = [this](const Case& other) { return judge_unless_interrupted(other); };
  for (Failure& failure : failures_)
    if (failure.kind == kind && explains(failure.minimal, kind, c, judged)) return &failure;
  return nullptr;
}

Verdict Findings::judge_unless_interrupted(const Case& c) const {
  return interrupted_ ? held_verdict() : judge_.verdict_of(c);
}

Shrunk Findings::shrunk(const Case& c, const Verdict& verdict) const {
  const ShrinkBudget budget{.time = std::chrono::milliseconds(static_cast<int64_t>(options_.shrink_seconds * 1000)),
                            .runs = options_.shrink_runs,
                            .threads = judge_.size()};
  const std::string kind = verdict.kind();
  return shrink(c, verdict, budget, [&](const Case& candidate) {
    const Verdict found = judge_unless_interrupted(candidate);
    return found.kind() == kind ? found : held_verdict();  // a smaller case of another failure says nothing about this one
  });
}

void Findings::add_alike(const Case& c, const Verdict& verdict, Failure& known) {
  if (known.alike++ < kAlikeKept) known.some_alike.push_back(c);
  tell_({{"type", "alike"},
         {"engine", options_.engine ? options_.engine->name() : ""},
         {"case", c.str()},
         {"what", verdict.str()},
         {"minimal", known.minimal.str()},
         {"replay", replay_line(c, options_)}});
}

void Findings::add_failure(const Case& c, const Shrunk& shrunk, int64_t cases) {
  const Case& minimal = shrunk.minimal;
  const CloseUp seen = interrupted_ ? CloseUp() : judge_.look_at(minimal, shrunk.verdict, c);
  const Explanation& looks_like = seen.looks_like;
  const std::string kind = shrunk.verdict.kind();
  database_.store(minimal, shrunk.verdict.str());
  failures_.push_back({c, minimal, shrunk.verdict.str(), kind, looks_like, cases});
  enough_ = std::ssize(failures_) >= options_.failures_max;
  tell_({{"type", "failure"},
         {"engine", options_.engine ? options_.engine->name() : ""},
         {"case", minimal.str()},
         {"what", shrunk.verdict.str()},
         {"kind", kind},
         {"step", shrunk.verdict.step + 1},
         {"value", shrunk.verdict.difference.value},
         {"tensor", shrunk.verdict.difference.tensor},
         {"rank", shrunk.verdict.difference.rank},
         {"where", looks_like.where},
         {"first", looks_like.first},
         {"replicas", looks_like.replicas},
         {"replicas_differ", seen.replicas},
         {"guess", looks_like.guess},
         {"original", c.str()},
         {"cases", cases},
         {"tried", shrunk.tried},
         {"replay", replay_line(minimal, options_)},
         {"picture", seen.picture}});
}

}  // namespace harness
