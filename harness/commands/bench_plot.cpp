#include "harness/commands/bench_plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>

namespace harness {
namespace {

constexpr double kRow = 26, kNames = 120, kBars = 260, kFigures = 120, kTop = 52;

std::string words(double x, double y, const std::string& text, const char* anchor = "start") {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\">{}</text>\n", x, y, anchor, text);
}

std::string line(double x, double y, double to_x, double to_y, const char* color) {
  return fmt::format("<path d=\"M{:.1f} {:.1f}L{:.1f} {:.1f}\" stroke=\"{}\" stroke-width=\"1.5\"/>\n", x, y, to_x, to_y,
                     color);
}

struct Bar {
  double value, low, high;  // low and high: 0 where nothing is marked
};

// One panel: a bar for each row, from 0, and its figure behind it.
std::string panel(double left, const std::string& title, const std::vector<Bar>& bars, const char* color) {
  double most = 0;
  for (const Bar& bar : bars) most = std::max({most, bar.value, bar.high});
  std::string svg = words(left, kTop - 10, title);
  for (size_t i = 0; i < bars.size(); ++i) {
    const Bar& bar = bars[i];
    const double y = kTop + kRow * static_cast<double>(i), middle = y + kRow / 2 - 3;
    const auto x = [&](double value) { return left + (most == 0 ? 0 : value / most) * kBars; };
    svg += fmt::format("<rect x=\"{}\" y=\"{}\" width=\"{:.1f}\" height=\"{}\" fill=\"{}\"/>\n", left, y, x(bar.value) - left,
                       kRow - 6, color);
    if (bar.high > 0) {
      svg += line(x(bar.low), middle, x(bar.high), middle, "#222");
      for (const double end : {bar.low, bar.high}) svg += line(x(end), middle - 6, x(end), middle + 6, "#222");
    }
    svg += words(x(std::max(bar.value, bar.high)) + 6, y + 15, fmt::format("{:.1f}", bar.value));
  }
  return svg;
}

}  // namespace

std::string bars_of(const std::vector<PlottedRow>& rows, const std::string& title) {
  const double width = kNames + 2 * (kBars + kFigures), height = kTop + kRow * static_cast<double>(rows.size()) + 24;
  std::vector<Bar> times, peaks;
  std::string names;
  for (size_t i = 0; i < rows.size(); ++i) {
    const PlottedRow& row = rows[i];
    times.push_back({row.step_ms, row.step_ms_min, row.step_ms_max});
    peaks.push_back({row.peak_mib, row.formula_mib, row.formula_mib});
    names += words(kNames - 10, kTop + kRow * static_cast<double>(i) + 15, row.name, "end");
  }
  return fmt::format(
             "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" height=\"{1}\" "
             "font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"{0}\" height=\"{1}\" fill=\"white\"/>\n",
             width, height) +
         words(10, 20, title) + names + panel(kNames, "step in ms: median of rounds, and their range", times, "#4878a8") +
         panel(kNames + kBars + kFigures, "peak of a rank in MiB; the mark is the formula", peaks, "#a8784a") + "</svg>\n";
}

}  // namespace harness
