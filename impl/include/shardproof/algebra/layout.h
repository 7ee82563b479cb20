// A layout says which elements of a tensor each rank of a mesh holds. This header is arithmetic on integers only.
//
// A layout is written for each dim of the tensor, while DTensor's placements are written for each axis of the mesh. `dims[d]`
// lists the splits of dim d, the outermost first. Splits of different dims commute, so their order is not stored. Splits of one
// dim do not commute, so their order is stored. Then `flat` splits may cut the row-major run of what is left (ragged
// shards). Where that run is a part of a longer one, as a parameter is of a bucket, `bucket` says which part, and the flat
// splits cut the longer one. `partial` names the axes whose ranks hold terms of a sum. An axis that is named nowhere is
// replicated. See docs/layout.md.
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
  std::vector<std::vector<Split>> dims;  // one entry for each dim of the tensor; a dim without an entry is not split
  std::vector<Split> flat;
  std::vector<std::string> partial;  // no axis twice
  // What the flat splits cut. The runs of all ranks begin at this offset, also where an uneven split of a dim leaves them runs
  // of different lengths.
  BucketPlace bucket = {};

  // Whether both are written alike. Layouts that the functions below build have no trailing empty dims, and a sorted `partial`.
  // `canonical` makes equal what means the same on one mesh and shape.
  bool operator==(const Layout&) const = default;

  // Whether the axis splits a dim or the flat run.
  bool splits(std::string_view axis) const;

  // E.g. "dim0[tp,dp_shard] flat[cp:0|3|5] partial[dp_replicate]", "flat[dp_shard]@10/16" for a run that begins at element 10
  // of a bucket of 16, or "replicated" when no axis is named.
  std::string str() const;
};

// The layout that is replicated along every axis.
Layout replicated();
// These return a copy of the layout with one more split, which becomes the innermost, or with one more partial axis.
Layout split_dim(Layout layout, int64_t dim, Split split);
Layout split_flat(Layout layout, Split split);
Layout add_partial(Layout layout, std::string axis);
// The layout of a tensor at `offset` of a bucket, of a row-major 1-dim tensor, that is laid out as `of_bucket` says. `dims` are
// the splits of the tensor's own dims. Law: a rank holds those of the tensor's elements that lie in its part of the bucket.
Layout in_bucket(std::vector<std::vector<Split>> dims, const Layout& of_bucket, BucketPlace place);

// Throws Error, which names layout, mesh and shape, when a size is negative, an axis is unknown or used twice, a split dim does
// not exist, ragged bounds do not fit, or the tensor reaches out of its bucket. Every function below calls it.
void validate(const Shape& shape, const Mesh& mesh, const Layout& layout);

// Returns the layout without what changes nothing on this mesh and shape. It removes axes of size 1 and trailing empty dims,
// makes ragged bounds even that equal the even cut, drops a bucket that nothing cuts or that the tensor fills, and turns the
// flat splits of a 1-dim tensor outside of a bucket into innermost splits of its dim. Laws: canonical(a) == canonical(b)
// implies owned(a) == owned(b) on every rank; canonical is idempotent; `plan` does not change when its layouts are made
// canonical.
Layout canonical(const Shape& shape, const Mesh& mesh, const Layout& layout);

// The shape of the tensor that the splits of dims leave to `rank`, before any flat split. A size may be 0. Where a rank has
// several runs of a dim, they lie end to end.
Shape local_shape(const Shape& shape, const Mesh& mesh, const Layout& layout, int64_t rank);

// The boxes of global indices that `rank` holds, in its storage order. No box is empty. Without flat splits there is at most
// one box; with them there are at most 2 * dims - 1, and one for a 0-dim tensor. There are more where splits in segments or
// balanced splits give a rank several runs of a dim: one for each run of dim 0, and in a later dim one for each run and each
// index before it. A rank that holds terms of a sum holds the indices of these terms. Law: the boxes of all ranks that have the
// same coordinate along every replicated and partial axis tile the tensor exactly, apart from runs that are held in copies.
std::vector<Box> owned(const Shape& shape, const Mesh& mesh, const Layout& layout, int64_t rank);

// A run of the tensor's elements, in row-major order, that a rank holds.
struct OwnedRun {
  Interval whole;
  int64_t local = 0;  // where it begins in the rank's storage order
  bool operator==(const OwnedRun&) const = default;
};

// Returns what `rank` holds as runs, in its storage order. Runs that follow each other are joined.
std::vector<OwnedRun> owned_runs(const Shape& shape, const Mesh& mesh, const Layout& layout, int64_t rank);

// The number of elements that `rank` holds. It takes constant time for each split.
int64_t owned_numel(const Shape& shape, const Mesh& mesh, const Layout& layout, int64_t rank);

// Who else holds an element: other ranks along a replicated axis, which are replicas, and neighbours along a split in segments
// where these are held in copies. Terms of a sum are nobody's copies.

// The ranks with the coordinates of `rank` along every axis that the layout names, ascending. Law: they hold the same.
std::vector<int64_t> replicas(const Mesh& mesh, const Layout& layout, int64_t rank);

// For each rank the lowest one that holds the same, whole piece by whole piece. Law: it holds the same elements.
std::vector<int64_t> first_holders(const Shape& shape, const Mesh& mesh, const Layout& layout);

// What counts of what `rank` holds where each element is to count once: no rank with a lower coordinate along a replicated axis
// or a split has it as a copy. As intervals of the rank's storage order, joined and not empty. Law: over all ranks that have
// the same coordinate along every partial axis, these elements tile the tensor exactly.
std::vector<Interval> first_copies(const Shape& shape, const Mesh& mesh, const Layout& layout, int64_t rank);

}  // namespace shardproof
