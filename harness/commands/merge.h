// Puts the reports of several runs of verify together, as a job array writes them.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace harness {

struct MergedFailure {
  std::string minimal, what, where, guess;
};

struct MergedReports {
  int64_t reports = 0, cases = 0, failures = 0, values_compared = 0, oracle_differences = 0;
  double seconds = 0;  // of all runs
  bool interrupted = false;
  std::map<std::string, int64_t> features;
  std::vector<MergedFailure> minimal;  // each case once
  bool held() const { return failures == 0 && oracle_differences == 0; }
};

// Reads files of `verify --json`. Throws Error, naming the file, where one cannot be read, or has no summary because its run
// did not end.
MergedReports merge_reports(const std::vector<std::string>& paths);

// As verify prints it.
std::string describe(const MergedReports& merged);

// JUnit's XML, as CI systems read it: one test of all cases, and one for each failure.
std::string junit(const MergedReports& merged);

}  // namespace harness
