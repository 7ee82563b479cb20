// Puts the reports of several runs of verify together, as a job array writes them.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "harness/commands/combinations.h"

namespace harness {

struct MergedFailure {
  nlohmann::json line;  // as its run wrote it, with a `replay` and a number of `cases` in any case
  int64_t alike = 0;    // other cases that failed of the same cause
  int64_t report = 0;   // which of the reports has it

  // "" where the line has none: a crash says less than other failures, and so does a report of an older build.
  std::string text(const char* key) const { return line.value(key, ""); }
};

// Which of the cases of a campaign a report has.
struct MergedPart {
  std::string drawn_from, asked;  // as "seed 1 --tiny" and "200 cases"
  int64_t part = 1, parts = 1;
  std::string path;
};

struct MergedReports {
  int64_t reports = 0, cases = 0, failures = 0, values_compared = 0, oracle_differences = 0;
  double seconds = 0;  // of all runs
  bool interrupted = false;
  std::map<std::string, int64_t> features;
  Combinations combinations;
  std::vector<MergedPart> parts;  // one a report
  std::vector<MergedFailure> minimal;  // one a cause, as far as that can be told without running cases
  std::map<std::string, size_t> cause_of;  // of each minimal case of the reports, its place in `minimal`
  bool held() const { return failures == 0 && oracle_differences == 0; }
};

// Adds what one line of `verify --json` says. Throws nlohmann's exception where it is no such line.
void add_line(const nlohmann::json& line, MergedReports& merged);

// Reads files of `verify --json`. Throws Error, naming the file, where one cannot be read, or has no summary because its run
// did not end. A campaign that was dealt to several parts must be complete, and no case may be in two reports: for that two
// reports from one seed and the same limits have to be different parts of one campaign. `also`, where it is not empty, gets
// each line too.
MergedReports merge_reports(const std::vector<std::string>& paths,
                            const std::function<void(const nlohmann::json&)>& also = {});

// As verify prints it. Texts of the files are escaped. `everything`: also how many cases had which feature, and how many pairs
// of values were drawn.
std::string describe(const MergedReports& merged, bool everything);

// JUnit's XML, as CI systems read it: one test of all cases, and one for each failure.
std::string junit(const MergedReports& merged);

}  // namespace harness
