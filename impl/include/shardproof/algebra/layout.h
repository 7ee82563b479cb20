// A layout: which elements of a tensor each rank of a mesh holds. Pure integers, no Torch.
//
// A layout is written per tensor dim, not per mesh axis: `dims[d]` lists the splits of dim d, outermost
// first. Splits of different dims commute, so their order is not stored; splits of one dim do not, so theirs
// is. After them the row-major run of what is left may be cut once more by `flat` splits (buckets, ragged
// shards). `partial` names the axes whose ranks hold terms of a sum. An axis named nowhere is replicated. See
// docs/layout.md.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "shardproof/algebra/box.h"
#include "shardproof/algebra/mesh.h"
#include "shardproof/algebra/split.h"

namespace shardproof {

struct Layout {
  std::vector<std::vector<Split>> dims;  // per tensor dim; a missing entry means "not split"
  std::vector<Split> flat;
  std::vector<std::string> partial;  // each at most once

  // Structural. Layouts made by the builders below have no trailing empty dims and a sorted `partial`;
  // `canonical` also removes what only this mesh and shape make equal.
  bool operator==(const Layout&) const = default;

  // Whether the axis splits a dim or the flat run.
  bool splits(std::string_view axis) const;

  // E.g. "dim0[tp,dp_shard] flat[cp:0|3|5] partial[dp_replicate]"; "replicated" when nothing is named.
  std::string str() const;
};

// Replicated everywhere.
Layout replicated();
// Builders that return a copy with one more innermost split, or one more partial axis.
Layout split_dim(Layout layout, int64_t dim, Split split);
Layout split_flat(Layout layout, Split split);
Layout add_partial(Layout layout, std::string axis);

// Throws Error naming layout, mesh and shape when a size is negative, an axis is unknown or used twice, a
// split dim does not exist, or ragged bounds do not fit. Every function below calls it.
void validate(const Shape& shape, const Mesh& mesh, const Layout& layout);

// The layout without what changes nothing on this mesh and shape: axes of size 1 go, ragged bounds that equal
// the even cut become even, the flat splits of a 1-dim tensor become innermost splits of its dim, trailing
// empty dims go. Laws: canonical(a) == canonical(b) implies owned(a) == owned(b) on every rank; canonical is
// idempotent; `plan` does not change when its layouts are made canonical.
Layout canonical(const Shape& shape, const Mesh& mesh, const Layout& layout);

// The shape of the tensor that the splits of dims leave to `rank`, before any flat split. A size may be 0. A rank's runs of a
// dim lie end to end in it.
Shape local_shape(const Shape& shape, const Mesh& mesh, const Layout& layout, int64_t rank);

// The elements of the row-major order of that tensor that the flat splits leave to `rank`; all of them when
// nothing is flat.
Interval flat_run(const Shape& shape, const Mesh& mesh, const Layout& layout, int64_t rank);

// The boxes of global indices that `rank` holds, in its storage order; none is empty. Without flat splits at most one box,
// with them at most 2 * dims - 1 (and one for a 0-dim tensor). A split in segments and a balanced one give a rank several
// runs of a dim: each run is a box, and behind the first dim there is one for each index before it. A rank that holds
// terms of a partial sum holds the indices of those terms. Law: over the ranks of one coordinate along every replicated
// and partial axis, the boxes tile the tensor exactly, but for the runs that are held in copies.
std::vector<Box> owned(const Shape& shape, const Mesh& mesh, const Layout& layout, int64_t rank);

// A run of the tensor's row-major elements that a rank holds.
struct OwnedRun {
  Interval whole;
  int64_t local = 0;       // where it begins in the rank's storage order
  bool first_copy = true;  // no lower rank along the splitting axes holds it
  bool operator==(const OwnedRun&) const = default;
};

// What `owned` says, as runs in storage order; neighbours are joined. Law: over the ranks of one coordinate along every
// replicated and partial axis, the runs that are first copies tile the tensor exactly.
std::vector<OwnedRun> owned_runs(const Shape& shape, const Mesh& mesh, const Layout& layout, int64_t rank);
// The same of the part `local` of the rank's storage.
std::vector<OwnedRun> owned_runs(const Shape& shape, const Mesh& mesh, const Layout& layout, int64_t rank, Interval local);

// Appends elements `run` of the row-major order of a tensor of this shape, as boxes in that order.
void append_boxes(const Shape& shape, Interval run, std::vector<Box>& boxes);

// Sum of the sizes of `owned`, in constant time a split.
int64_t owned_numel(const Shape& shape, const Mesh& mesh, const Layout& layout, int64_t rank);

}  // namespace shardproof
