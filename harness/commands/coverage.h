// Counts what the cases of a run had in them, so that nobody believes in cases that were never drawn.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <tuple>
#include <vector>

#include "harness/commands/combinations.h"
#include "harness/run/run_case.h"

namespace harness {

class Coverage {
 public:
  // `passes`: it counts as no failure.
  void add(const Case& c, const Verdict& verdict, bool passes);

  int64_t cases() const { return cases_; }
  int64_t failures() const { return failures_; }
  int64_t values_compared() const { return values_compared_; }
  double ratio_max() const { return ratio_max_; }
  const std::map<std::string, int64_t>& features() const { return features_; }
  // In how many cases each registered property was asked.
  const std::map<std::string, int64_t>& properties() const { return properties_; }
  // Verdict::smallest_found of all cases that were measured, by kind.
  const std::map<std::string, std::vector<double>>& smallest_found() const { return smallest_found_; }

  const Combinations& combinations() const { return combinations_; }
  // {"facets": [{"name", "values"}], "drawn": [[value, value of a later facet, cases]]}, of the facets of a heat map. A pair
  // that is not among those drawn had no case.
  nlohmann::json pairs() const;

  // In two lines: what was drawn, and how much was compared.
  std::string overview() const;
  // strategy x model x world: cases and failures.
  std::string table() const;
  // How many cases had which feature.
  std::string summary() const;
  // In how many cases each registered property was asked; "" where there is none.
  std::string properties_summary() const;

 private:
  void add_history(const Case& c);
  void add_model(const Case& c);
  std::string found_summary() const;

  struct Row {
    int64_t cases = 0, failures = 0;
  };
  std::map<std::tuple<std::string, std::string, int64_t>, Row> rows_;
  std::map<std::string, int64_t> features_;
  std::map<std::string, int64_t> properties_;
  Combinations combinations_;
  int64_t cases_ = 0, failures_ = 0, values_compared_ = 0;
  double ratio_max_ = 0;
  std::map<std::string, std::vector<double>> smallest_found_;
};

}  // namespace harness
