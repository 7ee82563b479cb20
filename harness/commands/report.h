// The page of `verify --report`: what the lines of --json say, as one HTML file that needs nothing besides.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "harness/commands/merge.h"

namespace harness {

class Report {
 public:
  // A line of `verify --json`, of one run or of several, in any order.
  void add(const nlohmann::json& line);
  // The lines of `ci/faults --json`. Throws Error, naming the line, when the file has something else.
  void add_faults(const std::string& path);

  // What the page shows.
  nlohmann::json data() const;
  // The page: one file, whose script reads data() and loads nothing. No text of the lines is ever read as HTML.
  std::string page() const;

  // The cases that a page lists: so many, and those that failed. It counts all of them.
  static constexpr int64_t kCasesMax = 20'000;
  // Distances from the truth, over those of unsharded runs: bins of half an octave from 2^-7 to the tolerance, and one behind.
  static constexpr int64_t kBins = 21;
  static int64_t bin_of(double ratio);

 private:
  void add_case(const nlohmann::json& line);

  MergedReports merged_;
  int64_t cases_ = 0, bitwise_ = 0;
  nlohmann::json case_rows_ = nlohmann::json::array(), oracle_rows_ = nlohmann::json::array();
  nlohmann::json fault_rows_ = nlohmann::json::array(), facets_ = nlohmann::json::array();
  std::map<std::pair<std::string, std::string>, int64_t> pairs_;
  std::map<std::string, std::array<int64_t, kBins>> errors_;  // by precision
  std::map<std::string, std::vector<double>> smallest_found_;
};

// The page without data; its text is in harness/commands/report.
const std::string& report_template();

}  // namespace harness
