// A picture of a benchmark.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace harness {

struct PlottedRow {
  std::string name;  // of the contestant
  double step_ms = 0, step_ms_min = 0, step_ms_max = 0;  // medians of rounds: their median, and their range
  double peak_mib = 0, formula_mib = 0;                  // the latter is 0 where it is not known
};

// An SVG with two bars for each contestant: its step time with the range, and its peak of memory with a mark at the formula.
std::string bars_of(const std::vector<PlottedRow>& rows, const std::string& title);

// A line of a picture of costs.
struct PlottedCurve {
  std::string name;
  std::vector<std::pair<double, double>> points;  // against what, and seconds; both above 0
};
struct PlottedPanel {
  std::string title;  // says against what
  std::vector<PlottedCurve> curves;
};

// An SVG of panels side by side, in which both scales are logarithmic. A dotted line in each has the slope of proportion.
std::string curves_of(const std::vector<PlottedPanel>& panels, const std::string& title);

}  // namespace harness
