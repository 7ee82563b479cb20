#include "properties/kit/gen_layout.h"

#include <algorithm>
#include <ostream>

#include "properties/kit/spec_layout.h"

namespace shardproof {

void showValue(const Mesh& mesh, std::ostream& os) {
  os << "mesh(" << mesh.str() << ")";
}
void showValue(const Split& split, std::ostream& os) {
  os << split.str();
}
void showValue(const Layout& layout, std::ostream& os) {
  os << layout.str();
}
void showValue(const Placement& placement, std::ostream& os) {
  os << placement.layout.str() << " on mesh(" << placement.mesh.str() << ")";
}
void showValue(const Transfer& transfer, std::ostream& os) {
  os << transfer.source << " -> " << transfer.target << " [";
  for (const Interval& interval : transfer.box) os << " " << interval.begin << ":" << interval.end;
  os << " ]";
}

namespace gen {
namespace {

using Splits = std::vector<Split>;

// Whatever RapidCheck's size: most of its cases would otherwise be one rank or nothing split.
rc::Gen<int64_t> in_range(int64_t begin, int64_t end) {
  return rc::gen::resize(rc::kNominalSize, rc::gen::inRange<int64_t>(begin, end));
}

int64_t below(int64_t end) {
  return *in_range(0, end);
}

void show_shape(const Shape& shape, std::ostream& os) {
  os << "shape[";
  for (size_t d = 0; d < shape.size(); ++d) os << (d ? "," : "") << shape[d];
  os << "] ";
}

std::vector<int64_t> drawn_bounds(int64_t parts, int64_t length) {
  std::vector<int64_t> bounds{0, length};
  for (int64_t i = 1; i < parts; ++i) bounds.push_back(below(length + 1));
  std::sort(bounds.begin(), bounds.end());
  return bounds;
}

// Segments of `length` in total, with granules that divide them and copies where they may be.
std::vector<CutSegment> drawn_segments(int64_t parts, int64_t length) {
  std::vector<CutSegment> segments;
  for (int64_t left = length; left > 0 || segments.empty();) {
    CutSegment segment{left == 0 || segments.size() == 2 ? left : 1 + below(left), 1, false};
    std::vector<int64_t> granules;
    for (int64_t g = 1; g <= segment.length; ++g)
      if (segment.length % g == 0) granules.push_back(g);
    if (!granules.empty()) segment.granule = granules[below(std::ssize(granules))];
    const int64_t count = segment.length / segment.granule;
    segment.copied = (count == 0 || count >= parts || parts % count == 0) && below(2) == 1;
    left -= segment.length;
    segments.push_back(segment);
  }
  return segments;
}

bool fits(const Split& split, int64_t parts, int64_t length) {
  try {
    validate(split, length, parts, "a length");
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

// Draws bounds and segments anew where they do not fit the length; returns the longest piece that is left.
int64_t fit(Splits& splits, const Mesh& mesh, int64_t length) {
  for (Split& split : splits) {
    const int64_t parts = mesh.size(split.axis);
    if (!fits(split, parts, length)) {
      if (!split.segments.empty())
        split.segments = drawn_segments(parts, length);
      else
        split.bounds = drawn_bounds(parts, length);
    }
    size_t longest = 0;
    for (int64_t part = 0; part < parts; ++part) longest = std::max(longest, spec::dealt(split, length, parts, part).size());
    length = static_cast<int64_t>(longest);
  }
  return length;
}

Layout fitted(Layout layout, const Shape& shape, const Mesh& mesh) {
  layout.dims.resize(shape.size());
  int64_t region = 1;
  for (size_t d = 0; d < shape.size(); ++d) region *= fit(layout.dims[d], mesh, shape[d]);
  for (Split& split : layout.flat)
    if (!split.is_contiguous()) split = {split.axis};
  BucketPlace& bucket = layout.bucket;
  if (layout.flat.empty()) bucket = {};
  if (bucket.length > 0) bucket.length = std::max(bucket.length, bucket.offset + region);
  fit(layout.flat, mesh, bucket.length > 0 ? bucket.length : region);
  while (!layout.dims.empty() && layout.dims.back().empty()) layout.dims.pop_back();
  std::sort(layout.partial.begin(), layout.partial.end());
  return layout;
}

// Even half of the time; `fitted` draws the real bounds and segments.
Split drawn_split(const std::string& axis) {
  switch (below(6)) {
    case 3:
      return balanced_split(axis);
    case 4:
      return {axis, {0}};
    case 5:
      return split_in_segments(axis, {{-1, 1}});
    default:
      return {axis};
  }
}

// `fitted` makes it long enough.
BucketPlace drawn_bucket() {
  return {below(8), 1 + below(40)};
}

// One of a few, the earlier the simpler; said more than once, more often.
int64_t one_of(std::initializer_list<int64_t> choices) {
  return choices.begin()[below(choices.size())];
}

// The list of a dim, or of the flat run after the last dim.
Splits& list(Layout& layout, int64_t at) {
  return at < std::ssize(layout.dims) ? layout.dims[at] : layout.flat;
}

Layout drawn_layout(const Shape& shape, const Mesh& mesh, bool may_be_partial) {
  Layout layout;
  layout.dims.resize(shape.size());
  for (const Axis& axis : mesh.axes()) {
    const int64_t lists = std::ssize(shape) + 1;
    const int64_t use = below(2 * lists + (may_be_partial ? 2 : 1));  // two in three or more split
    if (use > 2 * lists) {
      layout.partial.push_back(axis.name);
    } else if (use > 0) {
      Splits& splits = list(layout, (use - 1) % lists);
      splits.insert(splits.begin() + below(splits.size() + 1), drawn_split(axis.name));
    }
  }
  if (below(3) == 2) layout.bucket = drawn_bucket();
  return fitted(std::move(layout), shape, mesh);
}

std::vector<std::string> unused(const Mesh& mesh, const Layout& layout) {
  std::vector<std::string> axes;
  for (const Axis& axis : mesh.axes())
    if (!layout.splits(axis.name) && std::count(layout.partial.begin(), layout.partial.end(), axis.name) == 0)
      axes.push_back(axis.name);
  return axes;
}

// Edits in place; one that finds nothing to act on leaves the layout as it is.
void edit(Layout& layout, const Shape& shape, const Mesh& mesh) {
  layout.dims.resize(shape.size());
  const int64_t lists = std::ssize(shape) + 1;
  const std::vector<std::string> free = unused(mesh, layout);
  Splits &one = list(layout, below(lists)), &other = list(layout, below(lists));
  switch (below(9)) {
    case 8:  // another bucket
      layout.bucket = below(2) == 0 ? BucketPlace() : drawn_bucket();
      break;
    case 0:  // one more split
      if (!free.empty()) one.push_back(drawn_split(free[below(free.size())]));
      break;
    case 1:  // one or more fewer
      if (!one.empty()) one.resize(below(one.size()));
      break;
    case 2: {  // innermost splits move
      const int64_t kept = one.empty() ? 0 : below(one.size());
      const Splits moved(one.begin() + kept, one.end());
      one.resize(kept);
      other.insert(other.end(), moved.begin(), moved.end());
      break;
    }
    case 3:  // terms are summed and the sum is split
      if (layout.partial.empty()) break;
      one.push_back(drawn_split(layout.partial.back()));
      layout.partial.pop_back();
      break;
    case 4:  // terms are summed
      if (!layout.partial.empty())
        layout.partial.erase(layout.partial.begin() + below(layout.partial.size()));
      break;
    case 5:  // one more partial axis
      if (!free.empty()) layout.partial.push_back(free[below(free.size())]);
      break;
    case 6:  // other bounds
      if (!one.empty()) one.back() = {one.back().axis, {0}};
      break;
    case 7:  // another axis cuts in place of the innermost
      if (!one.empty() && !free.empty()) one.back() = drawn_split(free[below(free.size())]);
      break;
  }
  layout = fitted(std::move(layout), shape, mesh);
}

}  // namespace

void showValue(const Placed& placed, std::ostream& os) {
  show_shape(placed.shape, os);
  shardproof::showValue(Placement{placed.mesh, placed.layout}, os);
}

void showValue(const Move& move, std::ostream& os) {
  show_shape(move.shape, os);
  shardproof::showValue(move.from, os);
  os << "  ->  ";
  shardproof::showValue(move.to, os);
}

rc::Gen<Mesh> mesh(int64_t ranks_max) {
  return rc::gen::exec([=] {
    // Neither in mesh order nor sorted, so that an order taken from the names shows.
    const std::vector<std::string> names{"tp", "dp_shard", "pp", "cp", "dp_replicate"};
    const int64_t count = one_of({0, 1, 1, 2, 2, 2, 3, 3}), first = below(names.size());
    std::vector<Axis> axes;
    int64_t room = ranks_max;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t size = std::min(one_of({1, 2, 2, 3, 3, 4}), room);
      axes.push_back({names[(first + i) % names.size()], size});
      room /= size;
    }
    return Mesh(axes);
  });
}

rc::Gen<Shape> shape() {
  return rc::gen::exec([] {
    Shape shape;
    for (int64_t d = one_of({0, 1, 1, 2, 2, 2, 3, 3}); d > 0; --d)
      shape.push_back(*rc::gen::weightedOneOf<int64_t>({
          {1, rc::gen::just<int64_t>(0)},
          {9, in_range(1, 9)},
      }));
    return shape;
  });
}

rc::Gen<Split> split(const std::string& axis, int64_t length, int64_t parts) {
  return rc::gen::exec([=] {
    Splits one{drawn_split(axis)};
    fit(one, Mesh(std::vector<Axis>{{axis, parts}}), length);
    return one.front();
  });
}

rc::Gen<Layout> layout(const Shape& shape, const Mesh& mesh) {
  return rc::gen::exec([=] { return drawn_layout(shape, mesh, true); });
}

rc::Gen<Layout> whole_layout(const Shape& shape, const Mesh& mesh) {
  return rc::gen::exec([=] { return drawn_layout(shape, mesh, false); });
}

rc::Gen<Layout> related_layout(const Shape& shape, const Mesh& mesh, const Layout& layout) {
  return rc::gen::exec([=] {
    Layout edited = layout;
    for (int64_t edits = 1 + below(2); edits > 0; --edits) {
      const Layout before = edited;
      for (int attempt = 0; attempt < 8 && edited == before; ++attempt) edit(edited, shape, mesh);
    }
    return edited;
  });
}

rc::Gen<Placed> placed() {
  return rc::gen::exec([] {
    const Shape its_shape = *shape();
    const Mesh its_mesh = *mesh();
    return Placed{its_shape, its_mesh, *layout(its_shape, its_mesh)};
  });
}

rc::Gen<Move> move() {
  return rc::gen::exec([] {
    const Shape its_shape = *shape();
    const Mesh from = *mesh(), to = below(2) == 0 ? from : *mesh();
    return Move{its_shape, {from, *layout(its_shape, from)}, {to, *layout(its_shape, to)}};
  });
}

rc::Gen<Move> move_on_one_mesh() {
  return rc::gen::exec([] {
    const Shape its_shape = *shape();
    const Mesh its_mesh = *mesh();
    const Layout from = *layout(its_shape, its_mesh);
    const Layout to =
        below(4) == 0 ? *layout(its_shape, its_mesh) : *related_layout(its_shape, its_mesh, from);
    return Move{its_shape, {its_mesh, from}, {its_mesh, to}};
  });
}

}  // namespace gen
}  // namespace shardproof
