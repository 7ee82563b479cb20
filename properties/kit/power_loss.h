// Looks at crash states: at all of them, or at those that a seed draws. A state that must not be is told with what replays it.
#pragma once

#include <gtest/gtest.h>

#include <charconv>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "harness/case/random.h"
#include "harness/run/power_loss.h"
#include "properties/kit/checkpoint_scratch.h"

namespace shardproof::checkpoint {

// What is found in the folder that holds a crash state, e.g. "the old one". Throws Error when that must not be. `mark` is the
// last mark before power failed.
using LookAtState = std::function<std::string(const std::string& root, int64_t mark)>;

// SHARDPROOF_POWER_LOSS='STORY CHOICES' looks at that one state only. Of a random history, CHOICES is the seed.
class PowerLossReplay : public testing::Environment {
 public:
  // A mistake in the variable is told once, and not by each test.
  void SetUp() override {
    const char* text = std::getenv("SHARDPROOF_POWER_LOSS");
    if (!text) return;
    const std::string line = text;
    const size_t space = line.rfind(' ');
    if (space == std::string::npos || space == 0 || space + 1 == line.size())
      FAIL() << "SHARDPROOF_POWER_LOSS is '" << line << "', expected 'STORY CHOICES', e.g. 'second save by 1 rank 3'";
    story_ = line.substr(0, space), choices_ = line.substr(space + 1);
  }
  // A replay that looked at nothing has not passed.
  void TearDown() override {
    if (!asked() || stories_.contains(story_)) return;
    std::string known;
    for (const std::string& story : stories_) known += "\n  " + story;
    ADD_FAILURE() << "SHARDPROOF_POWER_LOSS asks for the story '" << story_
                  << "'. The tests that ran have these:" << (known.empty() ? " none" : known);
  }

  bool asked() const { return !story_.empty(); }
  bool leaves_out(const std::string& story) {
    stories_.insert(story);
    return asked() && story != story_;
  }
  const std::string& choices() const { return choices_; }

 private:
  std::string story_, choices_;
  std::set<std::string> stories_;  // that the tests came by
};
inline PowerLossReplay& replay = static_cast<PowerLossReplay&>(*testing::AddGlobalTestEnvironment(new PowerLossReplay));

// The command that looks at this state again.
inline std::string replay_line(const std::string& story, const std::string& choices) {
  const testing::TestInfo& test = *testing::UnitTest::GetInstance()->current_test_info();
  return fmt::format("replay: SHARDPROOF_POWER_LOSS='{} {}' {} --gtest_filter={}.{}", story, choices,
                     std::filesystem::read_symlink("/proc/self/exe").string(), test.test_suite_name(), test.name());
}

// Of all states there are more than so many. A replay has only one.
inline void expect_more_than(int64_t few, int64_t count) {
  if (replay.asked()) return;
  EXPECT_GT(count, few);
}

inline uint64_t hash_of(const harness::DiskState& state) {
  uint64_t hash = harness::mix(static_cast<uint64_t>(state.mark));
  for (const auto& [path, bytes] : state.paths)
    hash = harness::mix(harness::mix(hash ^ std::hash<std::string>()(path)) ^ (bytes ? std::hash<std::string>()(*bytes) : 1));
  return hash;
}

// How many distinct crash states there were of each kind that `look` found.
using FoundStates = std::map<std::string, int64_t>;

// One list of choices after the other, until all were made. The last choice varies fastest.
class EachChoice : public harness::Choices {
 public:
  // Begins with this list, as `text` gives it, e.g. "12.0.1".
  explicit EachChoice(const std::string& list = "") {
    for (const char *at = list.data(), *end = at + list.size(); at < end;) {
      Choice choice{0, SIZE_MAX};
      const auto [stop, error] = std::from_chars(at, end, choice.chosen);
      SHARD_REQUIRE(error == std::errc() && (stop == end || *stop == '.'), "harness", "'{}' is no list of choices, e.g. 12.0.1",
                    list);
      choices_.push_back(choice);
      at = stop + 1;
    }
  }
  size_t choose(size_t count) override {
    if (made_ == choices_.size()) choices_.push_back({0, count});
    Choice& choice = choices_[made_++];
    choice.count = count;
    SHARD_REQUIRE(choice.chosen < count, "harness", "choice {} is {}, expected 0 to {}", made_, choice.chosen, count - 1);
    return choice.chosen;
  }
  // Goes on to the next list. Returns false after the last.
  bool next() {
    choices_.resize(made_);
    made_ = 0;
    while (!choices_.empty() && choices_.back().chosen + 1 == choices_.back().count) choices_.pop_back();
    if (choices_.empty()) return false;
    ++choices_.back().chosen;
    return true;
  }
  // Whether the list that it began with has no more choices than there were to make.
  bool all_made() const { return made_ == choices_.size(); }
  std::string text() const {
    std::string text;
    for (size_t i = 0; i < made_; ++i) text += (i ? "." : "") + std::to_string(choices_[i].chosen);
    return text;
  }

 private:
  struct Choice {
    size_t chosen = 0, count = 1;
  };
  std::vector<Choice> choices_;
  size_t made_ = 0;
};

// Every crash state once; those in which power fails after the first `calls` calls of the record or later.
inline FoundStates look_at_all_states(const std::string& story, const harness::DiskRecord& record,
                                      const harness::PowerLoss& how, const LookAtState& look, size_t calls = 0) {
  FoundStates found;
  if (replay.leaves_out(story)) return found;
  const Scratch scratch;
  std::set<uint64_t> seen;  // their hashes
  EachChoice choices(replay.asked() ? replay.choices() : std::to_string(calls));
  do {
    const harness::DiskState state = harness::lose_power(record, choices, how);
    // As when a flush was added since the line was printed.
    SHARD_REQUIRE(choices.all_made(), "test", "there is no state {} of '{}': after {} nothing is left to choose",
                  replay.choices(), story, choices.text());
    SHARD_REQUIRE(state.calls >= calls, "test", "choice 1 is {}, but in '{}' power fails after {} to {} calls", state.calls,
                  story, calls, record.calls.size());
    if (!seen.insert(hash_of(state)).second) continue;
    harness::restore(state, scratch.path());
    try {
      ++found[look(scratch.path(), state.mark)];
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what() << "\nafter " << state.calls << " of " << record.calls.size()
                    << " calls, with this on the disk:\n"
                    << state.str() << replay_line(story, choices.text());
      return found;
    }
  } while (!replay.asked() && choices.next());
  return found;
}

// Prints what was found, and returns how many states that were. Of a story that a replay leaves out, there is nothing to print.
inline int64_t tell(const std::string& story, const FoundStates& found) {
  if (replay.asked() && found.empty()) return 0;
  int64_t all = 0;
  std::string text;
  for (const auto& [what, count] : found) {
    all += count;
    text += fmt::format(", {} of {}", count, what);
  }
  std::printf("%s: %lld crash states%s\n", story.c_str(), static_cast<long long>(all), text.c_str());
  return all;
}

// What lies under a folder: the bytes of files by their paths.
inline std::map<std::string, std::string> contents(const std::string& folder) {
  std::map<std::string, std::string> found;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder))
    found[entry.path().string()] = entry.is_directory() ? "/" : slurp(entry.path().string());
  return found;
}

}  // namespace shardproof::checkpoint
