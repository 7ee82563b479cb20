// What every rank holds and what every collective does, as loops over elements and ranks: the specification
// that layout, plan and lower are held to. It shares no arithmetic with them.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "shardproof/algebra/plan.h"

namespace shardproof::spec {

// Counts ranks up from 0 as an odometer does.
std::vector<int64_t> coordinates(const Mesh& mesh, int64_t rank);

// The ranks that share all coordinates of `rank` except along `axes`, ordered by those, the last axis
// fastest.
std::vector<int64_t> group(const Mesh& mesh, int64_t rank, const std::vector<std::string>& axes);

// The indices of [0, length) that `part` of `parts` is dealt.
std::vector<int64_t> dealt(const Split& split, int64_t length, int64_t parts, int64_t part);

// The sizes of the tensor that `rank` holds; one size when the layout is flat.
Shape local_shape(const Shape& shape, const Mesh& mesh, const Layout& layout, int64_t rank);

// Row-major offsets of the elements that `rank` holds, in storage order.
std::vector<int64_t> held(const Shape& shape, const Mesh& mesh, const Layout& layout, int64_t rank);

// The offsets in a box, row-major.
std::vector<int64_t> offsets(const Shape& shape, const Box& box);

// An element is the list of the terms added to it, in that order, so that a sum in another order is another
// value. Zero is the empty list. A term names the element and the coordinates along the partial axes that it
// came from.
using Terms = std::vector<int64_t>;

// One rank's tensor; 1-dim when its layout is flat.
struct Local {
  Shape shape;
  std::vector<Terms> values;
};
using World = std::vector<Local>;

// Equal values in storage order on every rank, whatever shape they are seen in.
bool same_values(const World& a, const World& b);

// What the ranks hold under a placement, told from the definition.
World start(const Shape& shape, const Placement& placement);

// What `to` must hold once `from`, as started, has been turned into it.
World wanted(const Shape& shape, const Placement& from, const Placement& to);

// Runs transfers on `world`, which `from` describes. Throws std::logic_error where one reads or writes what
// is not held.
World execute(const Shape& shape, const Placement& from, const Placement& to,
              const std::vector<Transfer>& transfers, const World& world);

// What a step has to work with: the ranks' values before it, and which elements they hold before and after.
struct Scene {
  Mesh mesh;
  Layout from, to;
  World values, elements, elements_to;
};
Scene scene(const Shape& shape, const Mesh& mesh, const Layout& from, const Layout& to);

// Runs one step by its definition in plan.h, by pieces and group order alone. None when the pieces do not fit
// it.
std::optional<World> run(const CollectiveStep& step, const Scene& scene);

}  // namespace shardproof::spec
