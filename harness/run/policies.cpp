#include "harness/run/policies.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

#include "harness/case/random.h"
#include "shardproof/base/check.h"

namespace harness {
namespace {

using shardproof::SchedulePolicy;
using Actor = SchedulePolicy::Actor;
using Choice = SchedulePolicy::Choice;
using Choices = std::span<const Choice>;

bool is_background(const Choice& choice) {
  return choice.actor.kind != Actor::Kind::rank;
}

template <class Predicate>
std::optional<size_t> first_that(Choices choices, const Predicate& predicate) {
  const auto found = std::ranges::find_if(choices, predicate);
  if (found == choices.end()) return std::nullopt;
  return static_cast<size_t>(found - choices.begin());
}

class Eager final : public SchedulePolicy {
 public:
  size_t choose(Choices choices, int64_t running) override {
    if (const auto background = first_that(choices, is_background)) return *background;
    return running >= 0 ? static_cast<size_t>(running) : 0;
  }
};

class Latest final : public SchedulePolicy {
 public:
  size_t choose(Choices choices, int64_t running) override {
    if (running >= 0 && !is_background(choices[static_cast<size_t>(running)])) return static_cast<size_t>(running);
    if (const auto rank = first_that(choices, [](const Choice& choice) { return !is_background(choice); })) return *rank;
    return first_that(choices, [](const Choice& choice) { return choice.awaited; }).value_or(0);
  }
};

class Random final : public SchedulePolicy {
 public:
  explicit Random(uint64_t seed) : draws_(seed, "random schedule") {}
  size_t choose(Choices choices, int64_t) override {
    return static_cast<size_t>(draws_.bits(step_++) % static_cast<uint64_t>(choices.size()));
  }

 private:
  const Draws draws_;
  int64_t step_ = 0;
};

class Pct final : public SchedulePolicy {
 public:
  Pct(uint64_t seed, int64_t depth, int64_t steps) : priorities_(seed, "priorities") {
    const Draws draws(seed, "change points");
    const auto count = static_cast<size_t>(std::min(depth - 1, steps));
    for (int64_t i = 0; changes_.size() < count; ++i) changes_.insert(draws.integer(i, 0, steps - 1));
  }

  size_t choose(Choices choices, int64_t) override {
    if (changes_.contains(step_++)) lowered_[choices[highest(choices)].actor] = --lowest_;
    return highest(choices);
  }

 private:
  // Below 0 when it was lowered; the last one lies below all others.
  int64_t priority(const Actor& actor) const {
    const auto found = lowered_.find(actor);
    if (found != lowered_.end()) return found->second;
    const Draws draws = priorities_.at(static_cast<int64_t>(actor.kind)).at(actor.rank);
    return static_cast<int64_t>(draws.bits(actor.number) >> 1);
  }
  size_t highest(Choices choices) const {
    const auto found = std::ranges::max_element(choices, {}, [&](const Choice& choice) { return priority(choice.actor); });
    return static_cast<size_t>(found - choices.begin());
  }

  const Draws priorities_;
  std::set<int64_t> changes_;
  int64_t step_ = 0, lowest_ = 0;
  std::map<Actor, int64_t> lowered_;
};

// Choice 0 is the thread that could go on; the others follow in their order.
size_t numbered(int64_t number, size_t width, int64_t running) {
  if (running < 0 || number > running) return std::min(static_cast<size_t>(number), width - 1);
  return static_cast<size_t>(number == 0 ? running : number - 1);
}
int64_t number_of(size_t index, int64_t running) {
  const auto at = static_cast<int64_t>(index);
  if (running < 0 || at > running) return at;
  return at == running ? 0 : at + 1;
}

class Given final : public SchedulePolicy {
 public:
  explicit Given(std::vector<int64_t> choices) : choices_(std::move(choices)) {}
  size_t choose(Choices choices, int64_t running) override {
    const int64_t number = next_ < choices_.size() ? choices_[next_] : 0;
    ++next_;
    return numbered(number, choices.size(), running);
  }

 private:
  const std::vector<int64_t> choices_;
  size_t next_ = 0;
};

std::string text_of(const Actor& actor) {
  switch (actor.kind) {
    case Actor::Kind::rank:
      return fmt::format("rank {}\n", actor.rank);
    case Actor::Kind::host_thread:
      return fmt::format("rank {} thread {}\n", actor.rank, actor.number);
    case Actor::Kind::collective:
      return fmt::format("rank {} call {}\n", actor.rank, actor.number);
    case Actor::Kind::copy:
      return fmt::format("rank {} copy {}\n", actor.rank, actor.number);
  }
  return "?";
}

}  // namespace

std::shared_ptr<SchedulePolicy> make_policy(const Interleaving& interleaving) {
  switch (interleaving.kind) {
    case Interleaving::Kind::eager:
      return std::make_shared<Eager>();
    case Interleaving::Kind::latest:
      return std::make_shared<Latest>();
    case Interleaving::Kind::random:
      return std::make_shared<Random>(interleaving.seed);
    case Interleaving::Kind::pct:
      return std::make_shared<Pct>(interleaving.seed, interleaving.depth, interleaving.steps);
    case Interleaving::Kind::choices:
      return std::make_shared<Given>(interleaving.choices);
  }
  return nullptr;
}

size_t RecordedPolicy::choose(Choices choices, int64_t running) {
  const size_t chosen = policy_->choose(choices, running);
  SHARD_CHECK(chosen < choices.size(), "policy", "chose number {} of {}", chosen, choices.size());
  const Actor& actor = choices[chosen].actor;
  points_.push_back({number_of(chosen, running), std::ssize(choices)});
  for (const int64_t value : {static_cast<int64_t>(actor.kind), actor.rank, actor.number})
    digest_ = mix(digest_ ^ static_cast<uint64_t>(value));
  if (with_text_) text_ += text_of(actor);
  return chosen;
}

}  // namespace harness
