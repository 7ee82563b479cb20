// A layout made ready for arithmetic: axis names looked up once, so that work per rank touches integers only.
// Private.
#pragma once

#include <functional>
#include <span>
#include <vector>

#include "shardproof/algebra/box.h"

namespace shardproof {

class Mesh;
struct Layout;

}  // namespace shardproof

namespace shardproof::detail {

enum class Use { replicated, split, partial };

struct Cut {
  int64_t axis = 0;                 // position in the mesh
  int64_t parts = 1;                // size of that axis
  std::span<const int64_t> bounds;  // empty: even. Points into the layout.

  Interval piece(int64_t length, int64_t part) const;
  // The part that holds index `at`, 0 <= at < length. Its piece is not empty.
  int64_t part_at(int64_t length, int64_t at) const;
  // The longest piece of any length up to `length`.
  int64_t piece_size_max(int64_t length) const;
};

// Borrows the layout it was resolved from.
struct Cuts {
  Shape shape;
  std::vector<int64_t> axis_sizes;
  std::vector<int64_t> axis_strides;   // rank = sum of coordinate * stride
  std::vector<Use> uses;               // per axis
  std::vector<std::vector<Cut>> dims;  // one entry per tensor dim
  std::vector<Cut> flat;

  int64_t coordinate(int64_t rank, int64_t axis) const {
    return rank / axis_strides[axis] % axis_sizes[axis];
  }
  int64_t rank_count() const;
};

// Validates, then resolves. Throws what `validate` throws. Defined in layout.cpp, which knows the grammar of layouts.
Cuts resolve(const Shape& shape, const Mesh& mesh, const Layout& layout);

// What `rank` holds: the box that the splits of dims leave (it may be empty), the part of that box's
// row-major run that the flat splits leave, and both together as boxes in storage order.
Box region(const Cuts& cuts, int64_t rank);
Interval flat_run(const Cuts& cuts, int64_t region_numel, int64_t rank);
std::vector<Box> owned(const Cuts& cuts, int64_t rank);

// Appends elements `run` of the row-major order of `region`, as boxes in that order: at most 2 * dims - 1 of
// them.
void append_run(const Box& region, Interval run, std::vector<Box>& boxes);

// Narrows `box` to what it shares with `other`; false when nothing is left. The box of a 0-dim tensor always
// is.
bool intersect(Box& box, const Box& other);

// Visits, for every combination of coordinates along the split axes whose ranks hold something of `wanted`
// (not empty), the sum of those coordinates' rank strides and each box of the shared part. Coordinates along
// other axes are the caller's. `fixed[axis] >= 0` admits that coordinate only. Visits only what it yields,
// whatever the number of ranks.
using VisitHolder = std::function<void(int64_t rank_offset, const Box& box)>;
void for_each_holder(const Cuts& cuts, const Box& wanted, const std::vector<int64_t>& fixed,
                     const VisitHolder& visit);

}  // namespace shardproof::detail
