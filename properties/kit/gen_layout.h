// Generators of meshes, shapes, layouts and moves between layouts: valid by construction, shrinking towards
// one rank, one element, nothing split.
#pragma once

#include <rapidcheck.h>

#include <iosfwd>

#include "shardproof/algebra/plan.h"

namespace shardproof {

// How RapidCheck prints counterexamples.
void showValue(const Mesh& mesh, std::ostream& os);
void showValue(const Split& split, std::ostream& os);
void showValue(const Layout& layout, std::ostream& os);
void showValue(const Placement& placement, std::ostream& os);
void showValue(const Transfer& transfer, std::ostream& os);

namespace gen {

// A tensor laid out on a mesh.
struct Placed {
  Shape shape;
  Mesh mesh;
  Layout layout;
};

// A tensor that is to go from one placement to another.
struct Move {
  Shape shape;
  Placement from, to;
};

void showValue(const Placed& placed, std::ostream& os);
void showValue(const Move& move, std::ostream& os);

// 0 to 3 axes of sizes 1 to 4, at most `ranks_max` ranks.
rc::Gen<Mesh> mesh(int64_t ranks_max = 16);

// 0 to 3 dims of sizes 0 to 8, among them many of the same.
rc::Gen<Shape> shape();

// Any rule that fits the length.
rc::Gen<Split> split(const std::string& axis, int64_t length, int64_t parts);

// Every axis is replicated, partial, or splits a dim or the flat run, in any order; a dim by any rule, the flat run evenly or
// ragged, by itself or as a part of a bucket.
rc::Gen<Layout> layout(const Shape& shape, const Mesh& mesh);

// The same, with nothing partial.
rc::Gen<Layout> whole_layout(const Shape& shape, const Mesh& mesh);

// One or two edits away from `layout`: a split or a partial axis comes, goes, moves or changes its bounds.
// Such pairs are the ones that one collective can serve.
rc::Gen<Layout> related_layout(const Shape& shape, const Mesh& mesh, const Layout& layout);

rc::Gen<Placed> placed();
rc::Gen<Move> move();              // two meshes, or one twice
rc::Gen<Move> move_on_one_mesh();  // layouts unrelated or related

}  // namespace gen
}  // namespace shardproof
