// A picture of a benchmark.
#pragma once

#include <string>
#include <vector>

namespace harness {

struct PlottedRow {
  std::string name;  // of the contestant
  double step_ms = 0, step_ms_min = 0, step_ms_max = 0;  // medians of rounds: their median, and their range
  double peak_mib = 0, formula_mib = 0;                  // the latter is 0 where it is not known
};

// An SVG with two bars for each contestant: its step time with the range, and its peak of memory with a mark at the formula.
std::string bars_of(const std::vector<PlottedRow>& rows, const std::string& title);

}  // namespace harness
