#include "harness/plan/plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <vector>

#include "harness/train/train_progress.h"

namespace harness {
namespace {

using shardproof::MemoryKind;

constexpr std::array<const char*, 8> kColors = {"#3b6fb6", "#7fb2e5", "#d1722e", "#3c9a5f",
                                                "#8c6bb1", "#bbbbbb", "#c44e52", "#937860"};
static_assert(kColors.size() > shardproof::kMemoryKinds, "each kind and the activations have a colour of their own");
constexpr double kWidth = 900, kLeft = 150, kRight = 30, kRow = 22;

double plot_memory(Svg& svg, const DryRunResult& run, double memory_of_rank, double y) {
  struct Part {
    std::string what;
    int64_t bytes;
  };
  std::vector<Part> parts;
  int64_t counted = 0;
  for (int i = 0; i < shardproof::kMemoryKinds; ++i) {
    const auto kind = static_cast<MemoryKind>(i);
    if (kind == MemoryKind::activation) continue;  // all units' come below
    parts.push_back({to_string(kind), run.stepped.peak(kind)});
    counted += run.stepped.peak(kind);
  }
  parts.push_back({"activations", run.activation_bytes});
  counted += run.activation_bytes;
  const double most = std::max({static_cast<double>(counted), memory_of_rank, 1.0}), scale = (kWidth - kLeft - kRight) / most;
  svg.words(kLeft - 10, y + 16, "memory", 11, "end");
  double x = kLeft;
  for (size_t i = 0; i < parts.size(); ++i) {
    const double width = static_cast<double>(parts[i].bytes) * scale;
    svg.rectangle(x, y, width, kRow, kColors[i], fmt::format("{}: {}", parts[i].what, size_text(parts[i].bytes)));
    x += width;
  }
  if (memory_of_rank > 0) svg.frame(kLeft, y, memory_of_rank * scale, kRow, "#222222");
  y += kRow + 18;
  x = kLeft;
  for (size_t i = 0; i < parts.size(); ++i) {
    svg.rectangle(x, y - 9, 9, 9, kColors[i]);
    svg.words(x + 13, y, fmt::format("{} {}", parts[i].what, size_text(parts[i].bytes)), 9);
    x += 122;
  }
  svg.words(kLeft, y + 16,
            fmt::format("Each kind at its own peak; all memory together is at most {}.{}", size_text(run.peak_bytes),
                        memory_of_rank > 0
                            ? fmt::format(" The frame is what a rank has, {}.", size_text(static_cast<int64_t>(memory_of_rank)))
                            : ""),
            10);
  return y + 40;
}

// Bars that touch, or of which one is narrower than a pixel, are one.
void plot_row(Svg& svg, const std::string& what, const std::vector<TimelineBar>& bars, double scale, double y,
              const char* color) {
  svg.words(kLeft - 10, y + 15, what, 11, "end");
  svg.frame(kLeft, y, kWidth - kLeft - kRight, kRow, "#dddddd");
  double begin = -1, end = -1;
  const auto flush = [&] {
    if (begin >= 0)
      svg.rectangle(kLeft + begin * scale, y, std::max(0.5, (end - begin) * scale), kRow, color,
                    fmt::format("{} to {}", seconds_text(begin), seconds_text(end)));
  };
  for (const TimelineBar& bar : bars) {
    if (begin >= 0 && (bar.begin - end) * scale < 0.5) {
      end = std::max(end, bar.end);
      continue;
    }
    flush();
    begin = bar.begin, end = bar.end;
  }
  flush();
}

}  // namespace

std::string seconds_text(double seconds) {
  if (seconds >= 100) return fmt::format("{:.0f} s", seconds);
  if (seconds >= 1) return fmt::format("{:.2f} s", seconds);
  if (seconds >= 1e-3) return fmt::format("{:.2f} ms", seconds * 1e3);
  return fmt::format("{:.2f} us", seconds * 1e6);
}

Svg plot_step(const DryRunResult& run, const StepTime& time, double memory_of_rank, const std::string& title) {
  std::map<std::string, std::vector<TimelineBar>> rows;
  for (const TimelineBar& bar : time.bars) rows[bar.what].push_back(bar);
  Svg svg(kWidth, 170 + static_cast<double>(rows.size()) * (kRow + 6));
  svg.words(16, 24, title, 14);
  double y = plot_memory(svg, run, memory_of_rank, 44);
  const double scale = (kWidth - kLeft - kRight) / std::max(time.seconds, 1e-12);
  size_t color = 2;
  plot_row(svg, "operators", rows["compute"], scale, y, kColors[0]);
  y += kRow + 6;
  for (auto& [what, bars] : rows) {
    if (what == "compute") continue;
    std::ranges::sort(bars, {}, &TimelineBar::begin);
    plot_row(svg, what, bars, scale, y, kColors[color++ % kColors.size()]);
    y += kRow + 6;
  }
  svg.words(kLeft, y + 12, "0", 10);
  svg.words(kWidth - kRight, y + 12, seconds_text(time.seconds), 10, "end");
  return svg;
}

}  // namespace harness
