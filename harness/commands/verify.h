// Many random cases in several processes, failures shrunk, everything counted.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "harness/commands/coverage.h"
#include "harness/commands/findings.h"
#include "harness/commands/verify_options.h"

namespace harness {

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

// Cases are told in the order in which they are drawn, and all but times is the same however many jobs there are, unless the
// time to shrink runs out. Shows progress on stderr. `interrupted` may be set from a signal handler: the cases under way are
// finished, the rest left. REQUIRES that no other thread of this process holds a lock (workers.h). Throws Error for limits that
// cannot be met, golden::EnvironmentError when Python is asked for and missing.
VerifyResult verify(const VerifyOptions& options, const std::atomic<bool>& interrupted);

}  // namespace harness
