// A layout: which elements of a tensor each rank of a mesh holds. Pure integers, no Torch.
//
// A layout is written per tensor dim, not per mesh axis: `dims[d]` lists the splits of dim d, outermost first. Splits of
// different dims commute, so their order is not stored; splits of one dim do not, so theirs is. After them the row-major
// run of what is left may be cut once more by `flat` splits (buckets, ragged shards). `partial` names the axes whose
// ranks hold terms of a sum. An axis named nowhere is replicated. See docs/layout.md.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "shardproof/mesh.h"

namespace shardproof {

using Shape = std::vector<int64_t>;

// Half-open, in global indices.
struct Interval {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
  bool operator==(const Interval&) const = default;
};

// One interval per tensor dim. The box of a 0-dim tensor has no intervals and one element.
using Box = std::vector<Interval>;
int64_t numel(const Box& box);
int64_t numel(const Shape& shape);

// Cuts a length among the ranks along one axis.
struct Split {
  std::string axis;
  // Empty: even, in chunks of ceil(length / parts) as torch.chunk cuts (5 over 4 is 2,2,1,0). Otherwise ragged: parts + 1
  // ascending cut points from 0 to the length.
  std::vector<int64_t> bounds;
  bool operator==(const Split&) const = default;
};

// Piece `part` of [0, length) cut into `parts`. Law: the pieces are disjoint, ascending and cover [0, length).
Interval piece(const Split& split, int64_t length, int64_t parts, int64_t part);

struct Layout {
  std::vector<std::vector<Split>> dims;  // no trailing empty entries; a missing entry means "not split"
  std::vector<Split> flat;
  std::vector<std::string> partial;  // sorted, unique

  // Structural, so equal layouts compare equal once made by `make_layout` or `canonical`.
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

// Throws Error naming layout, mesh and shape when an axis is unknown, used twice, a dim does not exist, or ragged bounds
// do not fit. Every function below calls it.
void validate(const Shape& shape, const Mesh& mesh, const Layout& layout);

// The layout without what changes nothing on this mesh and shape: axes of size 1, ragged bounds that equal the even cut,
// trailing empty dims.
// Law: canonical(a) == canonical(b) implies owned(a) == owned(b) on every rank, and canonical is idempotent.
Layout canonical(const Shape& shape, const Mesh& mesh, const Layout& layout);

// The boxes of global indices that `rank` holds, in its storage order; none is empty. Without flat splits at most one box;
// with them at most 2 * dims - 1.
// Law: over the ranks of one coordinate along every replicated and partial axis, the boxes tile the tensor exactly.
std::vector<Box> owned(const Shape& shape, const Mesh& mesh, const Layout& layout, int64_t rank);

// Sum of the sizes of `owned`, in constant time a split.
int64_t owned_numel(const Shape& shape, const Mesh& mesh, const Layout& layout, int64_t rank);

}  // namespace shardproof
