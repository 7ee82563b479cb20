// Looks at crash states: at all of them, or at those that a seed draws. A state that must not be is told with what replays it.
#pragma once

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <set>
#include <string>

#include "harness/case/random.h"
#include "harness/run/power_loss.h"
#include "properties/kit/checkpoint_scratch.h"

namespace shardproof::checkpoint {

// What is found in the folder that holds a crash state, e.g. "the old one". Throws Error when that must not be. `mark` is the
// last mark before power failed.
using LookAtState = std::function<std::string(const std::string& root, int64_t mark)>;

// SHARDPROOF_POWER_LOSS="STORY CHOICES" looks at that one state only.
class PowerLossReplay {
 public:
  PowerLossReplay() {
    const char* text = std::getenv("SHARDPROOF_POWER_LOSS");
    if (!text) return;
    const std::string line = text;
    const size_t space = line.rfind(' ');
    SHARD_REQUIRE(space != std::string::npos, "test", "SHARDPROOF_POWER_LOSS is '{}', expected 'STORY CHOICES'", line);
    story = line.substr(0, space), choices = line.substr(space + 1);
  }
  bool leaves_out(const std::string& its_story) const { return !story.empty() && story != its_story; }
  std::string story, choices;
};

inline uint64_t hash_of(const harness::DiskState& state) {
  uint64_t hash = harness::mix(static_cast<uint64_t>(state.mark));
  for (const auto& [path, bytes] : state.paths)
    hash = harness::mix(harness::mix(hash ^ std::hash<std::string>()(path)) ^ (bytes ? std::hash<std::string>()(*bytes) : 1));
  return hash;
}

// How many distinct crash states there were of each kind that `look` found.
using FoundStates = std::map<std::string, int64_t>;

// Every crash state once; those in which power fails after the first `calls` calls of the record or later.
inline FoundStates look_at_all_states(const std::string& story, const harness::DiskRecord& record,
                                      const harness::PowerLoss& how, const LookAtState& look, size_t calls = 0) {
  const PowerLossReplay replay;
  FoundStates found;
  if (replay.leaves_out(story)) return found;
  const Scratch scratch;
  std::set<uint64_t> seen;  // their hashes
  harness::EachChoice choices(replay.story.empty() ? std::to_string(calls) : replay.choices);
  do {
    const harness::DiskState state = harness::lose_power(record, choices, how);
    if (!seen.insert(hash_of(state)).second) continue;
    harness::restore(state, scratch.path());
    try {
      ++found[look(scratch.path(), state.mark)];
    } catch (const std::exception& error) {
      ADD_FAILURE() << error.what() << "\nafter " << state.calls << " of " << record.calls.size()
                    << " calls, with this on the disk:\n"
                    << state.str() << "replay: SHARDPROOF_POWER_LOSS='" << story << " " << choices.text() << "'";
      return found;
    }
  } while (replay.story.empty() && choices.next());
  return found;
}

// Prints what was found, and returns how many states that were.
inline int64_t tell(const std::string& story, const FoundStates& found) {
  int64_t all = 0;
  std::string text;
  for (const auto& [what, count] : found) {
    all += count;
    text += fmt::format(", {} of {}", count, what);
  }
  std::printf("%s: %lld crash states%s\n", story.c_str(), static_cast<long long>(all), text.c_str());
  return all;
}

// Flushes nothing, for saves whose durability nobody asks for.
class HastyFiles : public FileSystem {
 public:
  int fsync(int) override { return 0; }
};

}  // namespace shardproof::checkpoint
