// What must move to turn one placement of a tensor into another, on the same mesh or on two different ones.
// Pure integers, no Torch. `plan` is the general answer and the oracle; `lower` names the one collective that
// does the same on one mesh, where there is one.
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

// `box` of the tensor goes from rank `source` of one mesh to rank `target` of the other. When several
// transfers reach the same element of a target, their values are summed in list order (terms of a partial
// sum, ascending by source); an element that the target holds and no transfer reaches is zero.
struct Transfer {
  int64_t source = 0;
  int64_t target = 0;
  Box box;
  bool operator==(const Transfer&) const = default;
};

// Every transfer, ordered by target, then source, then first element in row-major order. A rank that already
// has what it wants "sends" to itself. Each box is what one box of owned(from, source) and one of owned(to,
// target) share. Laws: (1) Executing it gives each target exactly owned(to), with the value of the tensor.
// (2) Without partial axes in `from`, each wanted element arrives once.
// (3) Along the axes where `from` is replicated, a target takes from the replica at its own coordinates:
// those of rank
//     `target` on one mesh, of rank `target % from.mesh.size()` on two. So a rank that has what it wants
//     takes it from itself, and replicas share the load.
// (4) Along an axis that is partial on both sides of one mesh, terms stay where they are.
// (5) All other terms are summed, and where `to` is partial along any other axis the sum goes to coordinate 0
// of it and
//     nothing elsewhere. On two meshes no terms stay apart.
std::vector<Transfer> plan(const Shape& shape, const Placement& from, const Placement& to);

// The rows of `plan` with this target or source, computed without enumerating the others.
std::vector<Transfer> plan_for_target(const Shape& shape, const Placement& from, const Placement& to,
                                      int64_t target);
std::vector<Transfer> plan_for_source(const Shape& shape, const Placement& from, const Placement& to,
                                      int64_t source);

enum class Step { none, slice, all_gather, all_reduce, reduce_scatter, all_to_all, general };
const char* to_string(Step step);

constexpr int64_t kFlat = -1;  // "the flat run" where a dim is asked for

// One step on one mesh. The group of a rank is mesh.peers(rank, axes), in that order; a piece is what a rank
// holds. Pieces may be uneven or empty, and `dim` may be split by outer axes too, which take no part.
//
// none            `to` is `from`.
// slice           No rank needs another: each keeps a part of what it has, on any dims and the flat run, and
//                 zero where a new partial axis says so: run its own transfers of the plan. `axes`: the new.
// all_gather      The group's pieces, concatenated along `dim` in group order (kFlat: end to end).
// all_reduce      The sum of the group's pieces in group order, which is ascending by rank.
// reduce_scatter  That sum, cut along `dim` into the group's pieces, in group order.
// all_to_all      The group holds one region cut along `dim` and cuts it along `dim_to` instead: a member
//                 gives another what its old piece and the other's new one share. Between two dims that is
//                 one box, a slice of the old piece; from or to kFlat it may be several. `dim_to == dim`
//                 moves ragged bounds.
// general         Anything else, such as several steps or a permutation of ranks: run the plan.
struct Lowered {
  Step step = Step::none;
  std::vector<std::string> axes;  // along which ranks take part, outermost split first (terms: in mesh order)
  int64_t dim = kFlat;     // the dim (or kFlat) that is split in `from`, or in `to` if it is not in `from`
  int64_t dim_to = kFlat;  // all_to_all: the dim that is split afterwards
  bool operator==(const Lowered&) const = default;
};

// Works on canonical layouts: equal ones give none, axes of size 1 do not appear, and a 1-dim tensor is split
// on dim 0, never flat. It is one collective when the axes that change are innermost along one dim or the
// flat run: a dim counts as innermost while nothing is flat, and the splits of dim 0 are cuts of the flat run
// too once all flat splits are among those that change. For an all_to_all the same axes in the same order are
// innermost before and after; sums need mesh order. Law: executing any lowered step with a loop over ranks
// equals executing the plan, order of sums included.
Lowered lower(const Shape& shape, const Mesh& mesh, const Layout& from, const Layout& to);

}  // namespace shardproof
