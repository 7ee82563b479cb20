#include "harness/commands/bench_plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>

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

std::string curve(const PlottedCurve& given, const char* color, double left, const Decades& across, const Decades& up) {
  std::string path, dots;
  for (const auto& [x, seconds] : given.points) {
    const double at_x = left + across.place(x) * kSide, at_y = kTop + (1 - up.place(seconds)) * kSide;
    path += fmt::format("{}{:.1f} {:.1f}", path.empty() ? "M" : "L", at_x, at_y);
    dots += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3\" fill=\"{}\"><title>{}: {:g} s at {:g}</title></circle>\n",
                        at_x, at_y, color, given.name, seconds, x);
  }
  return fmt::format("<path d=\"{}\" stroke=\"{}\" stroke-width=\"1.5\" fill=\"none\"/>\n{}", path, color, dots);
}

std::string axes(double left, const Decades& across, const Decades& up) {
  std::string svg = fmt::format("<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"none\" stroke=\"#888\"/>\n", left,
                                kTop, kSide, kSide);
  for (int64_t decade = across.low; decade <= across.high; ++decade)
    svg += words(left + across.place(std::pow(10, decade)) * kSide, kTop + kSide + 16, fmt::format("1e{}", decade), "middle");
  for (int64_t decade = up.low; decade <= up.high; ++decade) {
    const double y = kTop + (1 - up.place(std::pow(10, decade))) * kSide;
    svg += words(left - 6, y + 4, fmt::format("1e{} s", decade), "end") + line(left, y, left + kSide, y, "#ddd");
  }
  return svg;
}

// From the lower left on, as far as the panel goes. A panel of one value has no such line.
std::string proportion(double left, const Decades& across, const Decades& up) {
  if (across.high == across.low || up.high == up.low) return "";
  const auto decades = static_cast<double>(std::min(across.high - across.low, up.high - up.low));
  const double x = left + decades / static_cast<double>(across.high - across.low) * kSide;
  const double y = kTop + (1 - decades / static_cast<double>(up.high - up.low)) * kSide;
  return fmt::format("<path d=\"M{:.1f} {:.1f}L{:.1f} {:.1f}\" stroke=\"#888\" stroke-dasharray=\"2 4\"/>\n", left,
                     kTop + kSide, x, y);
}

}  // namespace

std::string curves_of(const std::vector<PlottedPanel>& panels, const std::string& title) {
  Decades up;
  for (const PlottedPanel& panel : panels)
    for (const PlottedCurve& one : panel.curves)
      for (const auto& point : one.points) up.include(point.second);
  const double width = kMargin + static_cast<double>(panels.size()) * (kSide + kMargin) + kLegend, height = kTop + kSide + 40;
  std::string body = words(10, 20, title);
  for (size_t i = 0; i < panels.size(); ++i) {
    const double left = kMargin + static_cast<double>(i) * (kSide + kMargin);
    Decades across;
    for (const PlottedCurve& one : panels[i].curves)
      for (const auto& point : one.points) across.include(point.first);
    body += words(left, kTop - 10, panels[i].title) + axes(left, across, up) + proportion(left, across, up);
    for (size_t c = 0; c < panels[i].curves.size(); ++c) {
      const char* color = kColors[c % std::size(kColors)];
      body += curve(panels[i].curves[c], color, left, across, up);
      if (i + 1 < panels.size()) continue;
      const double x = left + kSide + 16, y = kTop + 16 + 18 * static_cast<double>(c);
      body += line(x, y - 4, x + 16, y - 4, color) + words(x + 22, y, panels[i].curves[c].name);
    }
  }
  return fmt::format(
             "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" height=\"{1}\" "
             "font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"{0}\" height=\"{1}\" fill=\"white\"/>\n",
             width, height) +
         body + "</svg>\n";
}

}  // namespace harness
