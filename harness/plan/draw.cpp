#include "harness/plan/draw.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <set>
#include <vector>

namespace harness {
namespace {

using namespace shardproof;

constexpr int64_t kRanksMax = 32;
constexpr size_t kKindsMax = 16;
constexpr double kLeft = 300, kTop = 80, kCell = 46, kHigh = 34, kGap = 6, kBetween = 14;

struct Tensor {
  std::string what;  // "parameter", "gradient and state", ...
  std::string color;
  Shape shape;
  Placement at;
};

// A box of a tensor as a part of a rectangle: its rows down, all other dims, which lie side by side, to the right.
struct Part {
  double top = 0, bottom = 1, left = 0, right = 1;
};

// A scalar fills its rectangle. What is neither a matrix nor a vector is drawn as the run of its elements.
std::vector<Part> parts_of(const Tensor& tensor, int64_t rank) {
  std::vector<Part> parts;
  const auto of = [](int64_t index, int64_t length) { return static_cast<double>(index) / static_cast<double>(length); };
  const Shape& shape = tensor.shape;
  if (shape.size() == 2) {
    for (const Box& box : owned(shape, tensor.at.mesh, tensor.at.layout, rank))
      parts.push_back(
          {of(box[0].begin, shape[0]), of(box[0].end, shape[0]), of(box[1].begin, shape[1]), of(box[1].end, shape[1])});
    return parts;
  }
  for (const OwnedRun& run : owned_runs(shape, tensor.at.mesh, tensor.at.layout, rank))
    parts.push_back({0, 1, of(run.whole.begin, numel(shape)), of(run.whole.end, numel(shape))});
  return parts;
}

// Tensors of a parameter whose layouts are equal share a row.
std::vector<Tensor> tensors_of(const ParameterPlacement& placement) {
  const auto same = [&](const Placement& a, const Placement& b) {
    return canonical(placement.shape, a.mesh, a.layout) == canonical(placement.shape, b.mesh, b.layout);
  };
  std::vector<Tensor> tensors;
  const auto add = [&](const char* what, const char* color, const Placement& at) {
    for (Tensor& tensor : tensors)
      if (same(tensor.at, at)) {
        tensor.what += fmt::format(", {}", what);
        return;
      }
    tensors.push_back({what, color, placement.shape, at});
  };
  add("parameter", "#3b6fb6", placement.parameter);
  add("gradient", "#d1722e", placement.gradient);
  add("state", "#3c9a5f", placement.state);
  return tensors;
}

// The first parameter of each kind, in the order of names.
std::vector<std::pair<std::string, std::vector<Tensor>>> kinds_of(const std::map<std::string, ParameterPlacement>& placements) {
  std::vector<std::pair<std::string, std::vector<Tensor>>> kinds;
  std::set<std::string> seen;
  for (const auto& [name, placement] : placements) {
    std::vector<Tensor> tensors = tensors_of(placement);
    std::string kind = fmt::format("{}", fmt::join(placement.shape, "x"));
    for (const Tensor& tensor : tensors)
      kind += fmt::format(" {}", canonical(tensor.shape, tensor.at.mesh, tensor.at.layout).str());
    if (numel(placement.shape) > 0 && seen.insert(kind).second) kinds.emplace_back(name, std::move(tensors));
  }
  return kinds;
}

void draw_row(Svg& svg, const Tensor& tensor, double y, int64_t ranks) {
  svg.words(kLeft - 10, y + kHigh / 2 + 4, tensor.what, 10, "end");
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const double x = kLeft + static_cast<double>(rank) * (kCell + kGap);
    svg.rectangle(x, y, kCell, kHigh, "#eeeeee");
    const int64_t elements = owned_numel(tensor.shape, tensor.at.mesh, tensor.at.layout, rank);
    const std::string about =
        fmt::format("rank {}: {} of {} elements, {}", rank, elements, numel(tensor.shape), tensor.at.layout.str());
    for (const Part& part : parts_of(tensor, rank))
      svg.rectangle(x + part.left * kCell, y + part.top * kHigh, std::max(0.8, (part.right - part.left) * kCell),
                    std::max(0.8, (part.bottom - part.top) * kHigh), tensor.color, about);
    svg.frame(x, y, kCell, kHigh, "#999999");
  }
}

// The ranks and their coordinates above their columns.
void draw_ranks(Svg& svg, const Mesh& mesh, int64_t ranks) {
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const double x = kLeft + static_cast<double>(rank) * (kCell + kGap) + kCell / 2;
    svg.words(x, kTop - 22, fmt::format("rank {}", rank), 10, "middle");
    svg.words(x, kTop - 9, fmt::format("{}", fmt::join(mesh.coordinates(rank), ",")), 9, "middle");
  }
  std::vector<std::string> axes;
  for (const Axis& axis : mesh.axes()) axes.push_back(axis.name);
  svg.words(kLeft - 10, kTop - 9, fmt::format("{}", fmt::join(axes, ",")), 9, "end");
}

}  // namespace

Svg draw_layouts(const std::map<std::string, ParameterPlacement>& placements, const std::string& title) {
  const auto kinds = kinds_of(placements);
  const size_t shown = std::min(kinds.size(), kKindsMax);
  const Mesh mesh = placements.empty() ? Mesh() : placements.begin()->second.parameter.mesh;
  const int64_t ranks = std::min(mesh.size(), kRanksMax);
  double height = kTop;
  for (size_t i = 0; i < shown; ++i) height += kBetween + 14 + static_cast<double>(kinds[i].second.size()) * (kHigh + kGap);
  Svg svg(kLeft + static_cast<double>(ranks) * (kCell + kGap) + 20, height + 40);
  svg.words(16, 24, title, 14);
  draw_ranks(svg, mesh, ranks);
  double y = kTop;
  for (size_t i = 0; i < shown; ++i) {
    const auto& [name, tensors] = kinds[i];
    svg.words(16, y + 12, fmt::format("{} [{}]", name, fmt::join(tensors.front().shape, ", ")), 11);
    y += 14;
    for (const Tensor& tensor : tensors) {
      draw_row(svg, tensor, y, ranks);
      y += kHigh + kGap;
    }
    y += kBetween;
  }
  std::string left_out;
  if (ranks < mesh.size()) left_out += fmt::format("Ranks {} to {} are not shown. ", ranks, mesh.size() - 1);
  if (shown < kinds.size()) left_out += fmt::format("{} more kinds of parameters are not shown.", kinds.size() - shown);
  svg.words(16, height + 24, left_out, 11);
  return svg;
}

}  // namespace harness
