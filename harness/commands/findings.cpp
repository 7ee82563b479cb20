#include "harness/commands/findings.h"

#include <chrono>
#include <utility>

#include "harness/commands/causes.h"
#include "harness/run/picture.h"
#include "harness/run/replicas.h"
#include "harness/run/running_cases.h"

namespace harness {
namespace {

constexpr int64_t kAlikeKept = 100;  // of one cause; the others are in --json

}  // namespace

Findings::Findings(const VerifyOptions& options, const std::atomic<bool>& interrupted, std::atomic<int64_t>& idle,
                   std::function<Verdict(const Case&)> judge, std::function<void(const nlohmann::json&)> tell)
    : options_(options),
      interrupted_(interrupted),
      idle_(idle),
      judge_(std::move(judge)),
      tell_(std::move(tell)),
      database_(options.failures_directory) {}

void Findings::add(const Case& c, const Verdict& verdict, int64_t cases) {
  {
    std::unique_lock lock(mutex_);
    wait_for_turn(lock);
    ++shrinking_;
  }
  try {
    sort(c, verdict, cases);
  } catch (...) {
    end_turn();
    throw;
  }
  end_turn();
}

void Findings::wait_for_turn() {
  std::unique_lock lock(mutex_);
  wait_for_turn(lock);
}

void Findings::wait_for_turn(std::unique_lock<std::mutex>& lock) {
  if (!is_full()) return;
  ++idle_;
  while (is_full()) turn_.wait_for(lock, std::chrono::milliseconds(20));
  --idle_;
}

// Under the lock.
bool Findings::is_full() const {
  return shrinking_ > 0 && std::ssize(failures_) + shrinking_ >= options_.failures_max && !interrupted_;
}

bool Findings::enough() const {
  const std::lock_guard lock(mutex_);
  return std::ssize(failures_) >= options_.failures_max;
}

void Findings::end_turn() {
  const std::lock_guard lock(mutex_);
  --shrinking_;
  turn_.notify_all();
}

void Findings::sort(const Case& c, const Verdict& verdict, int64_t cases) {
  if (const auto cause = known_cause(c, verdict.kind())) return add_alike(c, verdict, *cause);
  if (enough()) return;
  const Shrunk found = shrunk(c, verdict);
  const std::lock_guard telling(telling_);  // two jobs may have shrunk failures of one cause
  if (const auto cause = known_cause(found.minimal, found.verdict.kind())) return add_alike(c, verdict, *cause);
  if (!enough()) add_failure(c, found, cases);
}

std::optional<size_t> Findings::known_cause(const Case& c, const std::string& kind) {
  for (size_t i = 0;; ++i) {
    Case minimal;
    {
      const std::lock_guard lock(mutex_);
      if (i == failures_.size()) return {};
      if (failures_[i].kind != kind) continue;
      minimal = failures_[i].minimal;
    }
    if (explains(minimal, kind, c, [this](const Case& other) { return judge_unless_interrupted(other); })) return i;
  }
}

Verdict Findings::judge_unless_interrupted(const Case& c) const {
  return interrupted_ ? held_verdict() : judge_(c);
}

Shrunk Findings::shrunk(const Case& c, const Verdict& verdict) const {
  const ShrinkBudget budget{.time = std::chrono::milliseconds(static_cast<int64_t>(options_.shrink_seconds * 1000)),
                            .runs = options_.shrink_runs,
                            .threads = [this] { return 1 + idle_; }};
  const std::string kind = verdict.kind();
  return shrink(c, verdict, budget, [&](const Case& candidate) {
    const Verdict found = judge_unless_interrupted(candidate);
    return found.kind() == kind ? found : held_verdict();  // a smaller case of another failure says nothing about this one
  });
}

void Findings::add_alike(const Case& c, const Verdict& verdict, size_t cause) {
  const std::lock_guard lock(mutex_);
  Failure& known = failures_[cause];
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
  const RunningCase running(minimal.str());
  const bool draws = !interrupted_ && !options_.engine;
  const Explanation looks_like =
      interrupted_ ? Explanation{} : explain(minimal, shrunk.verdict.outcome, ranks_of(options_));
  const nlohmann::json picture = draws ? to_json(picture_of(minimal, shrunk.verdict.step)) : nlohmann::json();
  nlohmann::json replicas;  // null where the run ends in an error, and of engines, which have no check
  if (draws && shrunk.verdict.outcome != Verdict::Outcome::error)
    replicas = {{"minimal", replicas_json(minimal)}, {"original", replicas_json(c)}};
  const std::string kind = shrunk.verdict.kind();
  database_.store(minimal, shrunk.verdict.str());
  const std::lock_guard lock(mutex_);
  failures_.push_back({c, minimal, shrunk.verdict.str(), kind, looks_like, cases});
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
         {"replicas_differ", replicas},
         {"guess", looks_like.guess},
         {"original", c.str()},
         {"cases", cases},
         {"tried", shrunk.tried},
         {"replay", replay_line(minimal, options_)},
         {"picture", picture}});
}

// After which step replicas differ, and after which their check complains, counted from 1; 0: never.
nlohmann::json Findings::replicas_json(const Case& c) const {
  const Replicas replicas = replicas_of(c, ranks_of(options_));
  return {{"differ", replicas.step + 1}, {"found", replicas.found + 1}};
}

}  // namespace harness
