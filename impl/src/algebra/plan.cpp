#include "shardproof/algebra/plan.h"

#include <algorithm>

#include "algebra/cuts.h"
#include "shardproof/base/check.h"

namespace shardproof {
namespace {

using detail::Cuts;
using detail::Use;

using detail::kAny;

bool before(const Box& a, const Box& b) {  // by first element, row-major
  return std::lexicographical_compare(a.begin(), a.end(), b.begin(), b.end(),
                                      [](Interval x, Interval y) { return x.begin < y.begin; });
}

bool before(const Transfer& a, const Transfer& b) {
  if (a.target != b.target) return a.target < b.target;
  if (a.source != b.source) return a.source < b.source;
  return before(a.box, b.box);
}

// Every sum of one multiple of its stride per axis in `axes`, ascending when they are in mesh order.
std::vector<int64_t> rank_offsets(const Cuts& cuts, const std::vector<int64_t>& axes) {
  std::vector<int64_t> offsets{0};
  for (const int64_t axis : axes) {
    std::vector<int64_t> wider;
    wider.reserve(offsets.size() * cuts.axis_sizes[axis]);
    for (const int64_t offset : offsets)
      for (int64_t c = 0; c < cuts.axis_sizes[axis]; ++c)
        wider.push_back(offset + c * cuts.axis_strides[axis]);
    offsets = std::move(wider);
  }
  return offsets;
}

// Both placements resolved, and the role of every axis decided, once for any number of rows and columns.
class Planner {
 public:
  Planner(const Shape& shape, const Placement& from, const Placement& to)
      : from_(detail::resolve(shape, from.mesh, from.layout)),
        to_(detail::resolve(shape, to.mesh, to.layout)),
        same_mesh_(from.mesh == to.mesh) {
    std::vector<int64_t> summed;
    for (int64_t axis = 0; axis < std::ssize(from_.uses); ++axis) {
      const bool stays = same_mesh_ && from_.uses[axis] == Use::partial && to_.uses[axis] == Use::partial;
      if (stays || from_.uses[axis] == Use::replicated)
        shared_axes_.push_back(axis);
      else if (from_.uses[axis] == Use::partial)
        summed.push_back(axis);
    }
    for (int64_t axis = 0; axis < std::ssize(to_.uses); ++axis)
      if (to_.uses[axis] == Use::partial && !(same_mesh_ && from_.uses[axis] == Use::partial))
        fresh_.push_back(axis);
    term_offsets_ = rank_offsets(from_, summed);
    from_free_.assign(from_.uses.size(), kAny);
    to_free_.assign(to_.uses.size(), kAny);
    from_has_copies_ = from_.has_copies();
  }

  // Appends the transfers to `target`, in order.
  void to_target(int64_t target, std::vector<Transfer>& transfers) const {
    for (const int64_t axis : fresh_)
      if (to_.coordinate(target, axis) != 0) return;
    const int64_t twin = target % from_.rank_count();
    int64_t base = 0;
    for (const int64_t axis : shared_axes_) base += from_.coordinate(twin, axis) * from_.axis_strides[axis];
    const auto begin = std::ssize(transfers);
    std::vector<int64_t> copies;  // of ranks that hold the same run, the one at the target's own place
    for (int64_t axis = 0; axis < std::ssize(from_.uses); ++axis) copies.push_back(from_.coordinate(twin, axis));
    for (const Box& wanted : detail::owned(to_, target))
      detail::for_each_holder(from_, wanted, from_free_, copies, [&](int64_t rank_offset, const Box& box) {
        for (const int64_t term : term_offsets_)
          transfers.push_back({base + rank_offset + term, target, box});
      });
    std::sort(transfers.begin() + begin, transfers.end(),
              [](const Transfer& a, const Transfer& b) { return before(a, b); });
  }

  // The transfers from `source`, in order.
  std::vector<Transfer> from_source(int64_t source) const {
    std::vector<Transfer> transfers;
    std::vector<int64_t> fixed(to_.uses.size(), kAny);  // coordinates that every target must have
    if (same_mesh_)
      for (const int64_t axis : shared_axes_) fixed[axis] = from_.coordinate(source, axis);
    for (const int64_t axis : fresh_) {
      if (fixed[axis] > 0) return transfers;
      fixed[axis] = 0;
    }
    int64_t base = 0;
    std::vector<int64_t> copied;  // axes along which every target gets the same
    for (int64_t axis = 0; axis < std::ssize(to_.uses); ++axis) {
      if (to_.uses[axis] == Use::split) continue;
      if (fixed[axis] == kAny)
        copied.push_back(axis);
      else
        base += fixed[axis] * to_.axis_strides[axis];
    }
    const std::vector<int64_t> copies = rank_offsets(to_, copied);
    for (const Box& held : detail::owned(from_, source))
      detail::for_each_holder(to_, held, fixed, to_free_, [&](int64_t rank_offset, const Box& box) {
        for (const int64_t copy : copies)
          if (takes(base + rank_offset + copy, source))
            transfers.push_back({source, base + rank_offset + copy, box});
      });
    std::sort(transfers.begin(), transfers.end(),
              [](const Transfer& a, const Transfer& b) { return before(a, b); });
    return from_has_copies_ ? without_other_copies(transfers, source) : transfers;
  }

  int64_t target_count() const { return to_.rank_count(); }

 private:
  // Other ranks hold some of what `source` holds. Of the targets that could take from it, what each takes by its own row.
  std::vector<Transfer> without_other_copies(const std::vector<Transfer>& possible, int64_t source) const {
    std::vector<Transfer> taken, row;
    for (size_t i = 0; i < possible.size(); ++i) {
      if (i > 0 && possible[i].target == possible[i - 1].target) continue;
      row.clear();
      to_target(possible[i].target, row);
      std::copy_if(row.begin(), row.end(), std::back_inserter(taken), [&](const Transfer& t) { return t.source == source; });
    }
    return taken;
  }

  // Whether `target` takes from the replica that `source` is. On one mesh `fixed` has seen to it.
  bool takes(int64_t target, int64_t source) const {
    if (same_mesh_) return true;
    const int64_t twin = target % from_.rank_count();
    return std::all_of(shared_axes_.begin(), shared_axes_.end(), [&](int64_t axis) {
      return from_.coordinate(twin, axis) == from_.coordinate(source, axis);
    });
  }

  Cuts from_, to_;
  bool same_mesh_;
  std::vector<int64_t> shared_axes_;   // of `from`: a source has the coordinates of the target('s twin)
  std::vector<int64_t> fresh_;         // of `to`: partial there only, so the sum goes to coordinate 0
  std::vector<int64_t> term_offsets_;  // of the sources whose terms are summed
  std::vector<int64_t> from_free_;     // no coordinate of a source is fixed
  std::vector<int64_t> to_free_;       // every copy of a target gets the same
  bool from_has_copies_ = false;
};

}  // namespace

std::vector<Transfer> plan(const Shape& shape, const Placement& from, const Placement& to) {
  const Planner planner(shape, from, to);
  std::vector<Transfer> transfers;
  for (int64_t target = 0; target < planner.target_count(); ++target) planner.to_target(target, transfers);
  return transfers;
}

std::vector<Transfer> plan_for_target(const Shape& shape, const Placement& from, const Placement& to,
                                      int64_t target) {
  to.mesh.coordinates(target);  // refuses a rank outside the mesh
  std::vector<Transfer> transfers;
  Planner(shape, from, to).to_target(target, transfers);
  return transfers;
}

std::vector<Transfer> plan_for_source(const Shape& shape, const Placement& from, const Placement& to,
                                      int64_t source) {
  from.mesh.coordinates(source);
  return Planner(shape, from, to).from_source(source);
}

}  // namespace shardproof
