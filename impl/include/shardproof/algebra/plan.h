// What has to move to turn one placement of a tensor into another, on the same mesh or between two meshes. `plan` answers this
// for every pair of placements, and tests use it as the oracle. `lower` names the one collective that does the same on one
// mesh, where there is one. This header is arithmetic on integers only.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shardproof/algebra/layout.h"

namespace shardproof {

struct Placement {
  Mesh mesh;
  Layout layout;
  bool operator==(const Placement&) const = default;
};

// The box of the tensor goes from rank `source` of the first mesh to rank `target` of the second. When several transfers reach
// the same element of a target, their values are terms of a sum and are added in the order of the list, which is ascending by
// source. An element that the target holds and that no transfer reaches is zero.
struct Transfer {
  int64_t source = 0;
  int64_t target = 0;
  Box box;
  bool operator==(const Transfer&) const = default;
};

// Returns every transfer, ordered by target, then by source, then by the first element in row-major order. A rank that already
// has what it wants "sends" to itself. Each box is the intersection of a box of owned(from, source) and a box of owned(to,
// target). Laws: (1) Executing the plan gives each target exactly owned(to), with the values of the tensor. (2) When `from` has
// no partial axes, each wanted element arrives once. (3) Along axes where `from` is replicated, a target takes from the replica
// at its own coordinates. These are the coordinates of
//     rank `target` on one mesh, and of rank `target % from.mesh.size()` on two. So a rank takes from itself what it has, and
//     replicas share the load.
// (4) On one mesh, along an axis that is partial on both sides, each rank keeps its own terms. (5) All other terms are summed.
// Where `to` is partial along another axis, the sum goes to coordinate 0 of this axis, and other
//     coordinates get zeros. Between two meshes all terms are summed.
std::vector<Transfer> plan(const Shape& shape, const Placement& from, const Placement& to);

// The transfers of `plan` with this target, or with this source. The other transfers are not computed.
std::vector<Transfer> plan_for_target(const Shape& shape, const Placement& from, const Placement& to,
                                      int64_t target);
std::vector<Transfer> plan_for_source(const Shape& shape, const Placement& from, const Placement& to,
                                      int64_t source);

enum class Step { none, slice, all_gather, all_reduce, reduce_scatter, all_to_all, general };
const char* to_string(Step step);

constexpr int64_t kFlat = -1;  // stands for the flat run, instead of a dim

// One step on one mesh. The group of a rank is mesh.peers(rank, axes), in that order. A piece is what a rank holds. Pieces may
// be uneven or empty. Outer axes may split `dim` too; they take no part in the step.
//
//   - none: both layouts mean the same.
//   - slice: no rank needs anything from another. Each rank keeps a part of what it has, in any dims and the flat run, and puts
//     zeros where a new partial axis says so. A rank runs its own transfers of the plan. `axes` are the new axes.
//   - all_gather: the pieces of the group are concatenated along `dim` in the order of the group (kFlat: end to end).
//   - all_reduce: the pieces of the group are summed in the order of the group, which is ascending by rank.
//   - reduce_scatter: the pieces are summed in the same way, and the sum is cut along `dim` into pieces, in the order of the
//     group.
//   - all_to_all: the group holds a region that is cut along `dim`, and cuts it along `dim_to` instead. A member sends another
//     what its old piece and the other's new piece share. Between two dims this is one box, a slice of the old piece. From or
//     to kFlat it may be several boxes. When `dim_to == dim` the step moves ragged bounds.
//   - general: the change is anything else, such as several steps or a permutation of ranks. The ranks run the plan.
struct CollectiveStep {
  Step step = Step::none;
  std::vector<std::string> axes;  // the axes along which ranks take part: outermost split first, or for sums in mesh order
  int64_t dim = kFlat;     // the dim (or kFlat) that is split in `from`, or in `to` if it is not split in `from`
  int64_t dim_to = kFlat;  // for all_to_all the dim that is split afterwards
  bool operator==(const CollectiveStep&) const = default;
};

// Finds the step from one layout to another. It first makes both layouts canonical, so layouts that become equal give `none`,
// axes of size 1 do not appear, and a 1-dim tensor is split along dim 0, never flat. One collective is enough when the axes
// that change are innermost along one dim or along the flat run. Splits of a dim count as innermost while no split is flat.
// Once all flat splits are among those that change, the splits of dim 0 count as cuts of the flat run. An all_to_all needs the
// same axes in the same order innermost before and after, and a sum needs its axes in mesh order. Law: executing the step with
// a loop over ranks equals executing the plan, and adds terms in the same order.
CollectiveStep lower(const Shape& shape, const Mesh& mesh, const Layout& from, const Layout& to);

}  // namespace shardproof
