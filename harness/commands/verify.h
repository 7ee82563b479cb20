// Many random cases on several threads, failures shrunk, everything counted.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "harness/case/generate.h"
#include "harness/commands/coverage.h"
#include "harness/run/engine.h"
#include "harness/run/explain.h"
#include "harness/run/ranks.h"

namespace harness {

struct VerifyOptions {
  Limits limits;
  int64_t cases = 200;
  double minutes = 0;  // above 0: this long instead of a number of cases
  uint64_t seed = 1;
  int64_t jobs = 0;          // 0: one a processor
  int64_t failures_max = 3;  // stop after so many
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
  Ranks* ranks = nullptr;  // null: threads. Others run one case at a time.
  int64_t ranks_max = 0;   // of those, the most that a case may have; 0: as many as it likes
  const Engine* engine = nullptr;  // instead of the library; one case at a time
};

struct Failure {
  Case original, minimal;
  std::string what;
  Explanation looks_like;  // of the minimal case
  int64_t cases = 0;  // how many had run when it was found, itself included
};

struct VerifyResult {
  Coverage coverage;
  std::vector<Failure> failures;
  int64_t from_corpus = 0;      // cases of the corpus that ran
  int64_t replayed = 0;         // cases of the failure database that ran
  int64_t left_out = 0;         // of both, since they need more ranks than there are, or functions that the device lacks
  int64_t oracle_compared = 0;  // against PyTorch in Python
  std::vector<std::string> oracle_differences;
  int64_t drawn = 0;                      // with those that an engine cannot train
  std::map<std::string, int64_t> refused;  // these, by reason
  CombinationFigures combinations;
  int64_t schedules = 0, schedules_distinct = 0;  // under which cases ran; those of two cases are never the same
  bool interrupted = false;
  double seconds = 0;
};

// Shows progress on stderr. `interrupted` may be set from a signal handler: the cases under way are finished, the rest
// left. Throws Error for limits that cannot be met, golden::EnvironmentError when Python is asked for and missing.
VerifyResult verify(const VerifyOptions& options, const std::atomic<bool>& interrupted);

// What runs the case once more, and what that has before the case.
std::string replay_line(const Case& c, const VerifyOptions& options);
std::string replay_words(const VerifyOptions& options);

}  // namespace harness
