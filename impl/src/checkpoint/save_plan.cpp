#include "checkpoint/save_plan.h"

#include <algorithm>
#include <utility>

#include "shardproof/base/check.h"

namespace shardproof::checkpoint {
namespace {

struct Atom {
  const std::string* name;
  Interval run;
  std::vector<int64_t> holders;
  uint64_t bytes = 0;
};

// Cut where any rank's part begins or ends, so that a rank holds all of an atom or nothing.
void append_atoms(const std::string& name, const HeldTensor& tensor, std::vector<Atom>& atoms) {
  std::vector<int64_t> points{0, numel(tensor.sizes)};
  for (const HeldRun& held : tensor.held) points.insert(points.end(), {held.run.begin, held.run.end});
  std::sort(points.begin(), points.end());
  points.erase(std::unique(points.begin(), points.end()), points.end());
  const auto item = static_cast<uint64_t>(dtype_info(tensor.dtype).bytes);
  const size_t first = atoms.size();
  for (size_t i = 0; i + 1 < points.size(); ++i) {
    const Interval run{points[i], points[i + 1]};
    atoms.push_back({&name, run, {}, static_cast<uint64_t>(run.size()) * item});
  }
  for (const HeldRun& held : tensor.held) {
    auto at = static_cast<size_t>(std::lower_bound(points.begin(), points.end(), held.run.begin) - points.begin());
    for (; at + 1 < points.size() && points[at] < held.run.end; ++at) {
      std::vector<int64_t>& holders = atoms[first + at].holders;
      if (std::find(holders.begin(), holders.end(), held.rank) == holders.end()) holders.push_back(held.rank);
    }
  }
}

// Appends `next` to `box` if the elements of both, one after the other, are those of a box.
bool append_box(PlannedBox& last, const PlannedBox& next) {
  bool outermost = true;  // whether all dims so far have one index
  for (size_t d = 0; d < last.box.size(); ++d) {
    if (last.box[d] == next.box[d]) {
      outermost &= last.box[d].size() == 1;
      continue;
    }
    if (!outermost || last.box[d].end != next.box[d].begin ||
        !std::equal(last.box.begin() + static_cast<int64_t>(d) + 1, last.box.end(),
                    next.box.begin() + static_cast<int64_t>(d) + 1))
      return false;
    last.box[d].end = next.box[d].end;
    if (last.runs.back().end == next.runs.front().begin)
      last.runs.back().end = next.runs.front().end;
    else
      last.runs.push_back(next.runs.front());
    return true;
  }
  return false;
}

// Who writes which atoms, by rank and name, ascending.
std::vector<std::map<std::string, std::vector<Interval>>> choose_writers(std::vector<Atom>& atoms, int64_t ranks) {
  std::stable_sort(atoms.begin(), atoms.end(), [](const Atom& a, const Atom& b) { return a.bytes > b.bytes; });
  std::vector<uint64_t> bytes(static_cast<size_t>(ranks), 0);
  std::vector<std::map<std::string, std::vector<Interval>>> chosen(static_cast<size_t>(ranks));
  for (const Atom& atom : atoms) {
    SHARD_REQUIRE(!atom.holders.empty(), "checkpoint", "no rank holds elements [{}, {}) of {}, so it cannot be saved",
                  atom.run.begin, atom.run.end, *atom.name);
    const int64_t rank = *std::min_element(atom.holders.begin(), atom.holders.end(), [&](int64_t a, int64_t b) {
      return std::pair(bytes[static_cast<size_t>(a)], a) < std::pair(bytes[static_cast<size_t>(b)], b);
    });
    bytes[static_cast<size_t>(rank)] += atom.bytes;
    chosen[static_cast<size_t>(rank)][*atom.name].push_back(atom.run);
  }
  for (auto& tensors : chosen)
    for (auto& [name, runs] : tensors)
      std::sort(runs.begin(), runs.end(), [](Interval a, Interval b) { return a.begin < b.begin; });
  return chosen;
}

std::vector<Interval> joined(const std::vector<Interval>& runs) {
  std::vector<Interval> result;
  for (const Interval run : runs) {
    if (!result.empty() && result.back().end == run.begin)
      result.back().end = run.end;
    else
      result.push_back(run);
  }
  return result;
}

}  // namespace

std::vector<PlannedBox> boxes_of(const std::string& name, const Shape& sizes, const std::vector<Interval>& runs) {
  std::vector<PlannedBox> result;
  for (const Interval run : joined(runs)) {
    std::vector<Box> boxes;
    append_boxes(sizes, run, boxes);
    int64_t at = run.begin;
    for (Box& box : boxes) {
      const int64_t end = at + numel(box);
      PlannedBox next{name, std::move(box), {{at, end}}};
      at = end;
      if (result.empty() || !append_box(result.back(), next)) result.push_back(std::move(next));
    }
  }
  return result;
}

std::vector<std::vector<PlannedBox>> plan_save(const std::map<std::string, HeldTensor>& tensors, int64_t ranks) {
  std::vector<Atom> atoms;
  for (const auto& [name, tensor] : tensors) append_atoms(name, tensor, atoms);
  auto chosen = choose_writers(atoms, ranks);
  for (const auto& [name, tensor] : tensors)
    if (numel(tensor.sizes) == 0) chosen[0][name] = {};
  std::vector<std::vector<PlannedBox>> plan(static_cast<size_t>(ranks));
  for (size_t rank = 0; rank < plan.size(); ++rank)
    for (const auto& [name, runs] : chosen[rank]) {
      const Shape& sizes = tensors.at(name).sizes;
      for (PlannedBox& box : boxes_of(name, sizes, runs)) plan[rank].push_back(std::move(box));
      if (!runs.empty()) continue;
      plan[rank].push_back({name, {}, {}});
      for (const int64_t size : sizes) plan[rank].back().box.push_back({0, size});
    }
  return plan;
}

}  // namespace shardproof::checkpoint
