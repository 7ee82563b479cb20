#include <algorithm>
#include <optional>

#include "shardproof/plan.h"

namespace shardproof {
namespace {

using Splits = std::vector<Split>;

// One list of splits (of a dim, or of the flat run) before and after, as their common outer splits and what
// follows.
struct Change {
  int64_t dim = kFlat;
  Splits from, to;  // what is left of each after the common prefix
};

std::vector<std::string> axes_of(const Splits& splits) {
  std::vector<std::string> axes;
  for (const Split& split : splits) axes.push_back(split.axis);
  return axes;
}

std::optional<Change> change_of(int64_t dim, const Splits& from, const Splits& to) {
  if (from == to) return std::nullopt;
  const auto [a, b] = std::mismatch(from.begin(), from.end(), to.begin(), to.end());
  return Change{dim, Splits(a, from.end()), Splits(b, to.end())};
}

std::vector<Change> changes(const Shape& shape, const Layout& from, const Layout& to) {
  std::vector<Change> changes;
  const auto dim_splits = [](const Layout& layout, size_t d) {
    return d < layout.dims.size() ? layout.dims[d] : Splits{};
  };
  for (size_t d = 0; d < shape.size(); ++d)
    if (auto change = change_of(d, dim_splits(from, d), dim_splits(to, d))) changes.push_back(*change);
  if (auto change = change_of(kFlat, from.flat, to.flat)) changes.push_back(*change);
  return changes;
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

const Lowered kGeneral{Step::general, {}, kFlat, kFlat};

// Splits only appear or only move; partial axes only appear.
Lowered lower_without_sum(const std::vector<Change>& changes, const std::vector<std::string>& gained) {
  const bool grows_only =
      std::all_of(changes.begin(), changes.end(), [](const Change& c) { return c.from.empty(); });
  if (grows_only) {
    Lowered slice{Step::slice, {}, kFlat, kFlat};
    for (const Change& change : changes)
      for (const Split& split : change.to) slice.axes.push_back(split.axis);
    slice.axes.insert(slice.axes.end(), gained.begin(), gained.end());
    if (!changes.empty()) slice.dim = changes.front().dim;
    return slice;
  }
  if (!gained.empty() || changes.size() > 2) return kGeneral;
  if (changes.size() == 1) {
    const Change& only = changes[0];
    if (only.to.empty()) return {Step::all_gather, axes_of(only.from), only.dim, kFlat};
    if (axes_of(only.from) != axes_of(only.to)) return kGeneral;
    return {Step::all_to_all, axes_of(only.from), only.dim, only.dim};
  }
  const bool first_shrinks = changes[0].to.empty();
  const Change& shrinks = changes[first_shrinks ? 0 : 1];
  const Change& grows = changes[first_shrinks ? 1 : 0];
  if (!shrinks.to.empty() || !grows.from.empty() || axes_of(shrinks.from) != axes_of(grows.to))
    return kGeneral;
  return {Step::all_to_all, axes_of(shrinks.from), shrinks.dim, grows.dim};
}

// The terms along `lost` (in mesh order) are summed.
Lowered lower_sum(const std::vector<Change>& changes, const std::vector<std::string>& lost) {
  if (changes.empty()) return {Step::all_reduce, lost, kFlat, kFlat};
  if (changes.size() > 1 || !changes[0].from.empty()) return kGeneral;
  // Another order of the splits would cut by one order of the group and sum by another.
  if (axes_of(changes[0].to) != lost) return kGeneral;
  return {Step::reduce_scatter, lost, changes[0].dim, kFlat};
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

Lowered lower(const Shape& shape, const Mesh& mesh, const Layout& from, const Layout& to) {
  const Layout a = canonical(shape, mesh, from), b = canonical(shape, mesh, to);
  if (a == b) return {};
  const std::vector<Change> changed = changes(shape, a, b);
  // A flat split cuts the run that the splits of dims leave, so it means something else once they change.
  for (const Change& change : changed) {
    const bool loses = !change.from.empty(), gains = !change.to.empty();
    if (change.dim != kFlat && ((loses && !a.flat.empty()) || (gains && !b.flat.empty() && !a.flat.empty())))
      return kGeneral;
  }
  const std::vector<std::string> lost = only_in(mesh, a.partial, b.partial),
                                 gained = only_in(mesh, b.partial, a.partial);
  if (lost.empty()) return lower_without_sum(changed, gained);
  return gained.empty() ? lower_sum(changed, lost) : kGeneral;
}

}  // namespace shardproof
