// A layout made ready for arithmetic: axis names looked up once, so that work per rank touches integers only.
// Private.
#pragma once

#include <functional>
#include <vector>

#include "algebra/split_rules.h"
#include "shardproof/algebra/box.h"

namespace shardproof {

class Mesh;
struct Layout;

}  // namespace shardproof

namespace shardproof::detail {

enum class Use { replicated, split, partial };

// Borrows the layout it was resolved from.
struct Cuts {
  Shape shape;
  std::vector<int64_t> axis_sizes;
  std::vector<int64_t> axis_strides;   // rank = sum of coordinate * stride
  std::vector<Use> uses;               // per axis
  std::vector<std::vector<Cut>> dims;  // one entry per tensor dim
  std::vector<Cut> flat;               // contiguous ones
  BucketPlace bucket;                  // what they cut

  int64_t coordinate(int64_t rank, int64_t axis) const { return rank / axis_strides[axis] % axis_sizes[axis]; }
  int64_t rank_count() const;
  // Whether several ranks along one axis hold the same run of a dim.
  bool has_copies() const;
  // What the flat splits cut, counted from the beginning of a rank's run of so many elements.
  Interval flat_space(int64_t region_numel) const {
    return bucket.length == 0 ? Interval{0, region_numel} : Interval{-bucket.offset, bucket.length - bucket.offset};
  }
};

// Validates, then resolves. Throws what `validate` throws. Defined in layout.cpp, which knows the grammar of layouts.
Cuts resolve(const Shape& shape, const Mesh& mesh, const Layout& layout);

// A run of one dim that a rank holds.
struct Strip {
  Interval whole;
  int64_t local = 0;       // where it begins in what the rank holds of the dim
  bool first_copy = true;  // no rank with a lower coordinate along a splitting axis holds it
  bool taken = true;       // false: it counts in `local`, and a walk leaves it to the rank that holds another copy
};

// What the splits of dims leave to a rank: per dim, strips that ascend in `whole` and in `local`. A dim of which nothing is
// left has none.
using Region = std::vector<std::vector<Strip>>;
Shape local_shape(const Region& region);

Region region(const Cuts& cuts, int64_t rank);
// The part of the region's row-major run that the flat splits leave to `rank`.
Interval flat_run(const Cuts& cuts, int64_t region_numel, int64_t rank);
// A box of global indices and whether every one of its strips is a first copy.
struct OwnedBox {
  Box box;
  bool first_copy = true;
};

// Both together, in storage order; and the boxes alone.
std::vector<OwnedBox> owned_boxes(const Cuts& cuts, int64_t rank);
std::vector<Box> owned(const Cuts& cuts, int64_t rank);

// Appends elements `run` of the row-major order of `region`, as boxes in that order, without strips that are not `taken`. With
// `wanted`, of each box only what it shares with `wanted`. Of a region of one strip a dim at most 2 * dims - 1 boxes.
void append_run(const Region& region, Interval run, const Box* wanted, std::vector<OwnedBox>& boxes);

// Visits, for every combination of coordinates along the split axes whose ranks hold something of `wanted`
// (not empty), the sum of those coordinates' rank strides and each box of the shared part. Coordinates along
// other axes are the caller's. `fixed[axis] >= 0` admits that coordinate only. `copies[axis] >= 0` admits, of the ranks along
// the axis that hold the same run, only the one whose number among them is that number modulo the number of copies. Visits
// only what it yields, whatever the number of ranks.
using VisitHolder = std::function<void(int64_t rank_offset, const Box& box)>;
void for_each_holder(const Cuts& cuts, const Box& wanted, const std::vector<int64_t>& fixed,
                     const std::vector<int64_t>& copies, const VisitHolder& visit);

}  // namespace shardproof::detail
