#include "harness/commands/bench_plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>

#include "harness/plan/svg.h"

namespace harness {
namespace {

constexpr double kRow = 26, kNames = 120, kBars = 260, kFigures = 120, kTop = 52;
constexpr double kText = 12;

struct Bar {
  double value, low, high;  // low and high: 0 where nothing is marked
};

// One panel: a bar for each row, from 0, and its figure behind it.
void add_bars(Svg& svg, double left, const std::string& title, const std::vector<Bar>& bars, const char* color) {
  double most = 0;
  for (const Bar& bar : bars) most = std::max({most, bar.value, bar.high});
  svg.words(left, kTop - 10, title, kText);
  for (size_t i = 0; i < bars.size(); ++i) {
    const Bar& bar = bars[i];
    const double y = kTop + kRow * static_cast<double>(i), middle = y + kRow / 2 - 3;
    const auto x = [&](double value) { return left + (most == 0 ? 0 : value / most) * kBars; };
    svg.rectangle(left, y, x(bar.value) - left, kRow - 6, color);
    if (bar.high > 0) {
      svg.line(x(bar.low), middle, x(bar.high), middle, "#222");
      for (const double end : {bar.low, bar.high}) svg.line(x(end), middle - 6, x(end), middle + 6, "#222");
    }
    svg.words(x(std::max(bar.value, bar.high)) + 6, y + 15, fmt::format("{:.1f}", bar.value), kText);
  }
}

}  // namespace

std::string bars_of(const std::vector<PlottedRow>& rows, const std::string& title) {
  Svg svg(kNames + 2 * (kBars + kFigures), kTop + kRow * static_cast<double>(rows.size()) + 24);
  svg.words(10, 20, title, kText);
  std::vector<Bar> times, peaks;
  for (size_t i = 0; i < rows.size(); ++i) {
    const PlottedRow& row = rows[i];
    times.push_back({row.step_ms, row.step_ms_min, row.step_ms_max});
    peaks.push_back({row.peak_mib, row.formula_mib, row.formula_mib});
    svg.words(kNames - 10, kTop + kRow * static_cast<double>(i) + 15, row.name, kText, "end");
  }
  add_bars(svg, kNames, "step in ms: median of rounds, and their range", times, "#4878a8");
  add_bars(svg, kNames + kBars + kFigures, "peak of a rank in MiB; the mark is the formula", peaks, "#a8784a");
  return svg.str();
}

namespace {

constexpr double kSide = 300, kMargin = 60, kLegend = 150;
const char* const kColors[] = {"#4878a8", "#a8784a", "#589858", "#a04868", "#7860a8", "#508898"};

// The powers of ten around the values of all panels.
struct Decades {
  int64_t low = 0, high = 0;
  void include(double value) {
    const auto below = static_cast<int64_t>(std::floor(std::log10(value))),
               above = static_cast<int64_t>(std::ceil(std::log10(value)));
    low = is_empty ? below : std::min(low, below);
    high = is_empty ? above : std::max(high, above);
    is_empty = false;
  }
  double place(double value) const {
    return (std::log10(value) - static_cast<double>(low)) / static_cast<double>(std::max<int64_t>(1, high - low));
  }
  bool is_empty = true;
};

// A square whose left side is here, with logarithmic scales.
struct Panel {
  double left;
  Decades across, up;

  double x(double value) const { return left + across.place(value) * kSide; }
  double y(double value) const { return kTop + (1 - up.place(value)) * kSide; }
};

void add_curve(Svg& svg, const PlottedCurve& given, const char* color, const Panel& panel) {
  for (size_t i = 0; i < given.points.size(); ++i) {
    const auto& [value, seconds] = given.points[i];
    if (i > 0)
      svg.line(panel.x(given.points[i - 1].first), panel.y(given.points[i - 1].second), panel.x(value), panel.y(seconds),
               color);
    svg.dot(panel.x(value), panel.y(seconds), color, fmt::format("{}: {:g} s at {:g}", given.name, seconds, value));
  }
}

void add_axes(Svg& svg, const Panel& panel) {
  svg.frame(panel.left, kTop, kSide, kSide, "#888");
  for (int64_t decade = panel.across.low; decade <= panel.across.high; ++decade)
    svg.words(panel.x(std::pow(10, decade)), kTop + kSide + 16, fmt::format("1e{}", decade), kText, "middle");
  for (int64_t decade = panel.up.low; decade <= panel.up.high; ++decade) {
    const double y = panel.y(std::pow(10, decade));
    svg.words(panel.left - 6, y + 4, fmt::format("1e{} s", decade), kText, "end");
    svg.line(panel.left, y, panel.left + kSide, y, "#ddd");
  }
}

// From the lower left on, as far as the panel goes. A panel of one value has no such line.
void add_proportion(Svg& svg, const Panel& panel) {
  const auto &across = panel.across, &up = panel.up;
  if (across.high == across.low || up.high == up.low) return;
  const int64_t decades = std::min(across.high - across.low, up.high - up.low);
  svg.line(panel.left, kTop + kSide, panel.x(std::pow(10, across.low + decades)), panel.y(std::pow(10, up.low + decades)),
           "#888", "2 4");
}

}  // namespace

std::string curves_of(const std::vector<PlottedPanel>& panels, const std::string& title) {
  Decades up;
  for (const PlottedPanel& panel : panels)
    for (const PlottedCurve& one : panel.curves)
      for (const auto& point : one.points) up.include(point.second);
  Svg svg(kMargin + static_cast<double>(panels.size()) * (kSide + kMargin) + kLegend, kTop + kSide + 40);
  svg.words(10, 20, title, kText);
  for (size_t i = 0; i < panels.size(); ++i) {
    Panel panel{kMargin + static_cast<double>(i) * (kSide + kMargin), {}, up};
    for (const PlottedCurve& one : panels[i].curves)
      for (const auto& point : one.points) panel.across.include(point.first);
    svg.words(panel.left, kTop - 10, panels[i].title, kText);
    add_axes(svg, panel);
    add_proportion(svg, panel);
    for (size_t c = 0; c < panels[i].curves.size(); ++c) {
      const char* color = kColors[c % std::size(kColors)];
      add_curve(svg, panels[i].curves[c], color, panel);
      if (i + 1 < panels.size()) continue;
      const double x = panel.left + kSide + 16, y = kTop + 16 + 18 * static_cast<double>(c);
      svg.line(x, y - 4, x + 16, y - 4, color);
      svg.words(x + 22, y, panels[i].curves[c].name, kText);
    }
  }
  return svg.str();
}

}  // namespace harness
