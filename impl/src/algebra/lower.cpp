#include <algorithm>
#include <optional>

#include "shardproof/algebra/plan.h"

namespace shardproof {
namespace {

using Splits = std::vector<Split>;

// A layout seen as "the ranks along `axes` cut `rest` along `dim`, in that order".
struct Cutting {
  Layout rest;
  std::vector<std::string> axes;
  int64_t dim = kFlat;
};

// The innermost splits along `dim`, or null when nothing can be taken off there. The flat run is cut out of
// what the splits of dims leave, so a dim is innermost only when nothing is flat. Pieces of dim 0 follow each
// other in row-major order, so below the flat splits those of dim 0 come off as cuts of the same run.
Splits* innermost(Layout& layout, int64_t dim) {
  if (dim == kFlat && !layout.flat.empty()) return &layout.flat;
  const size_t d = dim == kFlat ? 0 : dim;
  return layout.flat.empty() && d < layout.dims.size() && !layout.dims[d].empty() ? &layout.dims[d] : nullptr;
}

// Every such view of a canonical layout; along each dim, fewest axes first.
std::vector<Cutting> cuttings(const Layout& layout) {
  std::vector<Cutting> views;
  for (int64_t dim = layout.flat.empty() ? 0 : kFlat; dim < std::ssize(layout.dims); ++dim) {
    Cutting view{layout, {}, dim};
    while (Splits* splits = innermost(view.rest, dim)) {
      if (!splits->back().is_contiguous()) break;  // its pieces end to end are not the whole
      view.axes.insert(view.axes.begin(), splits->back().axis);
      splits->pop_back();
      views.push_back(view);
      Layout& rest = views.back().rest;
      while (!rest.dims.empty() && rest.dims.back().empty()) rest.dims.pop_back();
      if (rest.flat.empty()) rest.bucket = {};  // which nothing cuts any more
    }
  }
  return views;
}

// In `a` and not in `b`, in mesh order.
std::vector<std::string> only_in(const Mesh& mesh, const std::vector<std::string>& a,
                                 const std::vector<std::string>& b) {
  const auto has = [](const std::vector<std::string>& names, const std::string& name) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  std::vector<std::string> only;
  for (const Axis& axis : mesh.axes())
    if (has(a, axis.name) && !has(b, axis.name)) only.push_back(axis.name);
  return only;
}

// When `to` is `from` with more splits inside and more partial axes, `gained`: each rank keeps a part of its
// own.
std::optional<CollectiveStep> lower_slice(const Layout& from, const Layout& to,
                                   const std::vector<std::string>& gained) {
  CollectiveStep slice{Step::slice, {}, kFlat, kFlat};
  const auto grows = [&](const Splits& before, const Splits& after, int64_t dim) {
    if (before.size() > after.size() || !std::equal(before.begin(), before.end(), after.begin()))
      return false;
    if (slice.axes.empty() && before.size() < after.size()) slice.dim = dim;
    for (size_t i = before.size(); i < after.size(); ++i) slice.axes.push_back(after[i].axis);
    return true;
  };
  static const Splits none;
  for (size_t d = 0; d < std::max(from.dims.size(), to.dims.size()); ++d)
    if (!grows(d < from.dims.size() ? from.dims[d] : none, d < to.dims.size() ? to.dims[d] : none, d))
      return std::nullopt;
  const bool dims_grow = !slice.axes.empty();
  const bool same_run = from.flat.empty() || (!dims_grow && from.bucket == to.bucket);  // that the flat splits cut
  if (!same_run || !grows(from.flat, to.flat, kFlat)) return std::nullopt;
  slice.axes.insert(slice.axes.end(), gained.begin(), gained.end());
  return slice;
}

// The terms along `lost` are summed.
CollectiveStep lower_sum(const Layout& from, Layout to, const std::vector<std::string>& lost) {
  to.partial = from.partial;
  if (from == to) return {Step::all_reduce, lost, kFlat, kFlat};
  for (const Cutting& view : cuttings(to))
    // In another order than the mesh's, the group would cut by one order and sum by another.
    if (view.rest == from && view.axes == lost) return {Step::reduce_scatter, lost, view.dim, kFlat};
  return {Step::general, {}, kFlat, kFlat};
}

CollectiveStep lower_move(const Layout& from, const Layout& to) {
  const std::vector<Cutting> sources = cuttings(from), targets = cuttings(to);
  for (const Cutting& source : sources)
    if (source.rest == to) return {Step::all_gather, source.axes, source.dim, kFlat};
  for (const Cutting& source : sources)
    for (const Cutting& target : targets)
      if (source.rest == target.rest && source.axes == target.axes)
        return {Step::all_to_all, source.axes, source.dim, target.dim};
  return {Step::general, {}, kFlat, kFlat};
}

}  // namespace

const char* to_string(Step step) {
  switch (step) {
    case Step::none:
      return "none";
    case Step::slice:
      return "slice";
    case Step::all_gather:
      return "all_gather";
    case Step::all_reduce:
      return "all_reduce";
    case Step::reduce_scatter:
      return "reduce_scatter";
    case Step::all_to_all:
      return "all_to_all";
    case Step::general:
      return "general";
  }
  return "unknown";
}

CollectiveStep lower(const Shape& shape, const Mesh& mesh, const Layout& from, const Layout& to) {
  const Layout a = canonical(shape, mesh, from), b = canonical(shape, mesh, to);
  if (a == b) return {};
  const std::vector<std::string> lost = only_in(mesh, a.partial, b.partial),
                                 gained = only_in(mesh, b.partial, a.partial);
  if (!lost.empty() && !gained.empty()) return {Step::general, {}, kFlat, kFlat};
  if (!lost.empty()) return lower_sum(a, b, lost);
  return lower_slice(a, b, gained).value_or(lower_move(a, b));
}

}  // namespace shardproof
