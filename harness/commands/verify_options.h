// What a campaign of `verify` is asked for.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "harness/case/generate.h"
#include "harness/run/engine.h"
#include "harness/run/ranks.h"

namespace harness {

struct VerifyOptions {
  Limits limits;
  int64_t cases = 200;
  double minutes = 0;  // above 0: this long instead of a number of cases
  uint64_t seed = 1;
  int64_t jobs = 0;          // how many workers; 0: one a processor, and one where make_ranks is given
  int64_t failures_max = 3;  // stop after so many with different causes (causes.h)
  double shrink_seconds = 20;
  int64_t shrink_runs = 0;  // simpler cases tried for a failure, at most; 0: as many as there is time for
  bool python = true;
  std::string failures_directory = ".failures";
  std::string corpus_directory;  // "": none; else its cases run first, and each of its files must parse
  // Of the random cases only every `shard_count`-th, from the `shard`-th on: machines of a job array run one shard each.
  int64_t shard = 0, shard_count = 1;
  std::string json;
  std::function<void(const nlohmann::json&)> also;  // gets each line of --json as well, one at a time; may be empty
  int64_t schedules = 0;  // under so many each case runs, after it has held; rank-threads on the CPU only
  Ranks* ranks = nullptr;  // of processes that run one case at a time; null: cases run in workers, by threads
  // What makes the ranks of a worker, called there; empty: threads on the CPU.
  std::function<std::unique_ptr<Ranks>()> make_ranks;
  std::string backend;     // of ranks that somebody registered; else ""
  int64_t ranks_max = 0;   // of those, the most that a case may have; 0: as many as it likes
  const Engine* engine = nullptr;  // instead of the library; one case at a time
};

// What runs the case once more, and what that has before the case.
std::string replay_line(const Case& c, const VerifyOptions& options);
std::string replay_words(const VerifyOptions& options);

}  // namespace harness
