#include "shardproof/algebra/layout.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <set>

#include "algebra/cuts.h"
#include "shardproof/base/check.h"

namespace shardproof {
namespace {

std::string str(const std::vector<Split>& splits) {
  std::string text;
  for (const Split& split : splits) text += (text.empty() ? "" : ",") + split.str();
  return "[" + text + "]";
}

const std::string kFlatRun = "the flat run";

// Turns names into cuts and refuses what does not fit; the messages name the layout, the mesh and the shape.
class Resolver {
 public:
  Resolver(const Shape& shape, const Mesh& mesh, const Layout& layout)
      : shape_(shape), mesh_(mesh), layout_(layout), uses_(mesh.axes().size(), detail::Use::replicated) {}

  detail::Cuts resolve() {
    for (size_t d = 0; d < shape_.size(); ++d)
      require(shape_[d] >= 0,
              [&] { return fmt::format("dim {} must have a size of at least 0, got {}", d, shape_[d]); });
    numel(shape_);  // refuses what overflows
    detail::Cuts cuts{shape_, {}, {}, {}, std::vector<std::vector<detail::Cut>>(shape_.size()), {}, layout_.bucket};
    int64_t region_numel_max = 1;
    for (size_t d = 0; d < layout_.dims.size(); ++d) {
      if (layout_.dims[d].empty()) continue;
      require(d < shape_.size(), [&] {
        return fmt::format("dim {} is split by axis `{}` but the tensor has {} dims; split a dim that it has",
                           d, layout_.dims[d].front().axis, shape_.size());
      });
      cuts.dims[d] = cuts_of(layout_.dims[d], shape_[d], fmt::format("dim {}", d));
    }
    for (size_t d = 0; d < shape_.size(); ++d) region_numel_max *= size_max(cuts.dims[d], shape_[d]);
    const BucketPlace& bucket = cuts.bucket;
    require(bucket.length == 0 || (bucket.offset >= 0 && bucket.offset <= bucket.length - region_numel_max), [&] {
      return fmt::format("a run of {} elements at offset {} does not lie in a bucket of {}", region_numel_max, bucket.offset,
                         bucket.length);
    });
    cuts.flat = cuts_of(layout_.flat, bucket.length == 0 ? region_numel_max : bucket.length, kFlatRun);
    for (const std::string& axis : layout_.partial) uses_[use(axis)] = detail::Use::partial;
    cuts.uses = uses_;
    cuts.axis_strides.resize(mesh_.axes().size());
    int64_t stride = 1;
    for (size_t i = mesh_.axes().size(); i-- > 0; stride *= mesh_.axes()[i].size)
      cuts.axis_strides[i] = stride;
    for (const Axis& axis : mesh_.axes()) cuts.axis_sizes.push_back(axis.size);
    return cuts;
  }

 private:
  // The position of an axis that nothing has used yet.
  int64_t use(const std::string& axis) {
    require(mesh_.has(axis),
            [&] { return fmt::format("axis `{}` is not in the mesh; use one of its axes", axis); });
    const int64_t at = mesh_.index(axis);
    require(uses_[at] == detail::Use::replicated, [&] {
      return fmt::format("axis `{}` is used twice; an axis splits once or is partial once", axis);
    });
    return at;
  }

  std::vector<detail::Cut> cuts_of(const std::vector<Split>& splits, int64_t length,
                                   const std::string& what) {
    std::vector<detail::Cut> cuts;
    for (const Split& split : splits) {
      const int64_t axis = use(split.axis), parts = mesh_.axes()[axis].size;
      uses_[axis] = detail::Use::split;
      const std::string error = detail::misfit(split, length, parts, what);
      require(error.empty(), [&] { return error; });
      require(what != kFlatRun || split.is_contiguous(), [&] {
        return fmt::format("the flat run is cut evenly or by bounds, and split {} may give a rank several runs; split a dim so",
                           split.str());
      });
      cuts.push_back(detail::Cut{axis, parts, &split});
      length = cuts.back().piece_size_max(length);
    }
    return cuts;
  }

  static int64_t size_max(const std::vector<detail::Cut>& cuts, int64_t length) {
    for (const detail::Cut& cut : cuts) length = cut.piece_size_max(length);
    return length;
  }

  template <typename Message>
  void require(bool condition, Message message) const {
    SHARD_REQUIRE(condition, "layout", "{} (layout {}, mesh \"{}\", shape [{}])", message(), layout_.str(),
                  mesh_.str(), fmt::join(shape_, ","));
  }

  const Shape& shape_;
  const Mesh& mesh_;
  const Layout& layout_;
  std::vector<detail::Use> uses_;
};

// The lengths that the pieces of some `lengths` can have.
std::set<int64_t> piece_sizes(const detail::Cut& cut, const std::set<int64_t>& lengths) {
  std::set<int64_t> sizes;
  const bool is_even = cut.split->is_contiguous() && cut.split->bounds.empty();
  for (const int64_t length : lengths) {
    if (is_even) {  // the parts before the one that holds the last element are full, and those behind it are empty
      for (const int64_t part : {int64_t{0}, length > 0 ? cut.part_at(length, length - 1) : 0, cut.parts - 1})
        sizes.insert(cut.piece_size(length, part));
      continue;
    }
    for (int64_t part = 0; part < cut.parts; ++part) sizes.insert(cut.piece_size(length, part));
  }
  return sizes;
}

bool same_pieces(const Split& a, const Split& b, int64_t parts, const std::set<int64_t>& lengths) {
  const detail::Cut one{0, parts, &a}, other{0, parts, &b};
  for (const int64_t length : lengths)
    for (int64_t part = 0; part < parts; ++part)
      if (one.pieces(length, part) != other.pieces(length, part)) return false;
  return true;
}

// The simplest split that gives the same pieces of each of `lengths`.
Split simplest(const Split& split, int64_t parts, const std::set<int64_t>& lengths) {
  const Split even{split.axis};
  if (split == even || same_pieces(split, even, parts, lengths)) return even;
  if (split.is_contiguous() || lengths.empty()) return split;
  Split ragged{split.axis, {0}};  // what the longest says, if every part has one run
  const detail::Cut cut{0, parts, &split};
  for (int64_t part = 0; part < parts; ++part) {
    const std::vector<SplitRun> runs = cut.pieces(*lengths.rbegin(), part);
    const int64_t end = runs.empty() ? ragged.bounds.back() : runs.back().whole.end;
    if (end < ragged.bounds.back()) return split;
    ragged.bounds.push_back(end);
  }
  return ragged.bounds.back() == *lengths.rbegin() && same_pieces(split, ragged, parts, lengths) ? ragged : split;
}

// Drops axes of size 1 and writes every split in its simplest form; leaves in `lengths` those of the last pieces.
std::vector<Split> canonical_splits(const Mesh& mesh, const std::vector<Split>& splits, std::set<int64_t>& lengths) {
  std::vector<Split> kept;
  for (const Split& split : splits) {
    const int64_t parts = mesh.size(split.axis);
    if (parts == 1) continue;
    kept.push_back(simplest(split, parts, lengths));
    lengths = piece_sizes({0, parts, &split}, lengths);
  }
  return kept;
}

bool any_ragged(const std::vector<Split>& splits) {
  return std::any_of(splits.begin(), splits.end(), [](const Split& split) { return !split.bounds.empty(); });
}

// Calls f with each run of row-major elements that a box of a tensor of this shape is made of, ascending.
template <typename F>
void for_each_run(const Shape& shape, const Box& box, F&& f) {
  size_t inner = box.size();  // dims from here on are whole, but for the first of them
  int64_t row = 1;
  while (inner > 0) {
    --inner;
    if (box[inner].size() != shape[inner]) break;
    row *= shape[inner];
  }
  if (box.empty()) return f(Interval{0, 1});
  const int64_t unit = box[inner].size() == shape[inner] ? row / std::max<int64_t>(1, shape[inner]) : row;
  std::vector<int64_t> index;
  for (size_t d = 0; d < inner; ++d) index.push_back(box[d].begin);
  while (true) {
    int64_t offset = 0;
    for (size_t d = 0; d < inner; ++d) offset = offset * shape[d] + index[d];
    offset = (offset * shape[inner] + box[inner].begin) * unit;
    f(Interval{offset, offset + box[inner].size() * unit});
    size_t d = inner;
    while (d > 0 && ++index[d - 1] == box[d - 1].end) {
      index[d - 1] = box[d - 1].begin;
      --d;
    }
    if (d == 0) return;
  }
}

void drop_empty_tail(std::vector<std::vector<Split>>& dims) {
  while (!dims.empty() && dims.back().empty()) dims.pop_back();
}

}  // namespace

detail::Cuts detail::resolve(const Shape& shape, const Mesh& mesh, const Layout& layout) {
  return Resolver(shape, mesh, layout).resolve();
}

bool Layout::splits(std::string_view axis) const {
  const auto has = [&](const std::vector<Split>& splits) {
    return std::any_of(splits.begin(), splits.end(), [&](const Split& split) { return split.axis == axis; });
  };
  return has(flat) || std::any_of(dims.begin(), dims.end(), has);
}

std::string Layout::str() const {
  std::string text;
  const auto add = [&](const std::string& part) { text += (text.empty() ? "" : " ") + part; };
  for (size_t d = 0; d < dims.size(); ++d)
    if (!dims[d].empty()) add(fmt::format("dim{}{}", d, shardproof::str(dims[d])));
  if (!flat.empty()) add("flat" + shardproof::str(flat));
  if (bucket.length > 0) text += fmt::format("{}@{}/{}", flat.empty() ? "flat" : "", bucket.offset, bucket.length);
  std::string terms;
  for (const std::string& axis : partial) terms += (terms.empty() ? "" : ",") + axis;
  if (!terms.empty()) add("partial[" + terms + "]");
  return text.empty() ? "replicated" : text;
}

Layout replicated() {
  return {};
}

Layout split_dim(Layout layout, int64_t dim, Split split) {
  SHARD_REQUIRE(dim >= 0, "layout", "a dim to split counts from 0, got {} (axis `{}`)", dim, split.axis);
  if (static_cast<int64_t>(layout.dims.size()) <= dim) layout.dims.resize(dim + 1);
  layout.dims[dim].push_back(std::move(split));
  return layout;
}

Layout split_flat(Layout layout, Split split) {
  layout.flat.push_back(std::move(split));
  return layout;
}

Layout add_partial(Layout layout, std::string axis) {
  layout.partial.insert(std::lower_bound(layout.partial.begin(), layout.partial.end(), axis),
                        std::move(axis));
  return layout;
}

Layout in_bucket(std::vector<std::vector<Split>> dims, const Layout& of_bucket, BucketPlace place) {
  SHARD_REQUIRE(of_bucket.dims.size() <= 1 && of_bucket.bucket == BucketPlace(), "layout",
                "a bucket has one dim and lies in no other bucket, got layout {}", of_bucket.str());
  Layout layout{std::move(dims), {}, of_bucket.partial, place};
  if (!of_bucket.dims.empty()) layout.flat = of_bucket.dims[0];
  layout.flat.insert(layout.flat.end(), of_bucket.flat.begin(), of_bucket.flat.end());
  return layout;
}

void validate(const Shape& shape, const Mesh& mesh, const Layout& layout) {
  detail::resolve(shape, mesh, layout);
}

Layout canonical(const Shape& shape, const Mesh& mesh, const Layout& layout) {
  validate(shape, mesh, layout);
  Layout made;
  std::vector<std::set<int64_t>> lengths;  // per dim, of the ranks' pieces
  for (size_t d = 0; d < shape.size(); ++d) {
    lengths.push_back({shape[d]});
    made.dims.push_back(canonical_splits(mesh, d < layout.dims.size() ? layout.dims[d] : std::vector<Split>(), lengths[d]));
  }
  std::set<int64_t> numels{1};  // of what the splits of dims leave; followed only where something asks
  for (size_t d = 0; d < shape.size() && (layout.bucket.length > 0 || any_ragged(layout.flat)); ++d) {
    std::set<int64_t> products;
    for (const int64_t count : numels)
      for (const int64_t length : lengths[d]) products.insert(count * length);
    numels = std::move(products);
  }
  const bool filled = layout.bucket.offset == 0 && numels == std::set{layout.bucket.length};
  if (layout.bucket.length > 0 && !filled) {
    std::set<int64_t> length{layout.bucket.length};
    made.flat = canonical_splits(mesh, layout.flat, length);
    if (!made.flat.empty()) made.bucket = layout.bucket;
  } else if (shape.size() == 1) {
    for (Split& split : canonical_splits(mesh, layout.flat, lengths[0])) made.dims[0].push_back(std::move(split));
  } else {
    made.flat = canonical_splits(mesh, layout.flat, numels);
  }
  drop_empty_tail(made.dims);
  for (const std::string& axis : layout.partial)
    if (mesh.size(axis) > 1) made.partial.push_back(axis);
  std::sort(made.partial.begin(), made.partial.end());
  return made;
}

Shape local_shape(const Shape& shape, const Mesh& mesh, const Layout& layout, int64_t rank) {
  mesh.coordinates(rank);  // refuses a rank outside the mesh
  return detail::local_shape(detail::region(detail::resolve(shape, mesh, layout), rank));
}

std::vector<Box> owned(const Shape& shape, const Mesh& mesh, const Layout& layout, int64_t rank) {
  mesh.coordinates(rank);
  return detail::owned(detail::resolve(shape, mesh, layout), rank);
}

int64_t owned_numel(const Shape& shape, const Mesh& mesh, const Layout& layout, int64_t rank) {
  mesh.coordinates(rank);
  const detail::Cuts cuts = detail::resolve(shape, mesh, layout);
  return detail::flat_run(cuts, numel(detail::local_shape(detail::region(cuts, rank))), rank).size();
}

std::vector<OwnedRun> owned_runs(const Shape& shape, const Mesh& mesh, const Layout& layout, int64_t rank) {
  std::vector<OwnedRun> runs;
  int64_t at = 0;
  for (const Box& box : owned(shape, mesh, layout, rank))
    for_each_run(shape, box, [&](Interval whole) {
      if (!runs.empty() && runs.back().whole.end == whole.begin)
        runs.back().whole.end = whole.end;
      else
        runs.push_back({whole, at});
      at += whole.size();
    });
  return runs;
}

std::vector<int64_t> replicas(const Mesh& mesh, const Layout& layout, int64_t rank) {
  std::vector<std::string> along;
  for (const Axis& axis : mesh.axes())
    if (!layout.splits(axis.name) && std::ranges::count(layout.partial, axis.name) == 0) along.push_back(axis.name);
  return mesh.peers(rank, along);
}

std::vector<int64_t> first_holders(const Shape& shape, const Mesh& mesh, const Layout& layout) {
  const detail::Cuts cuts = detail::resolve(shape, mesh, layout);
  std::vector<int64_t> copies(cuts.uses.size(), 1);  // by axis, of neighbours
  for (size_t axis = 0; axis < copies.size(); ++axis)
    if (cuts.uses[axis] == detail::Use::replicated) copies[axis] = cuts.axis_sizes[axis];
  for (size_t d = 0; d < cuts.dims.size(); ++d)
    for (const detail::Cut& cut : cuts.dims[d]) copies[cut.axis] = cut.copies(shape[d]);
  std::vector<int64_t> first;
  for (int64_t rank = 0; rank < mesh.size(); ++rank) {
    first.push_back(rank);
    for (size_t axis = 0; axis < copies.size(); ++axis)
      first.back() -= cuts.coordinate(rank, static_cast<int64_t>(axis)) % copies[axis] * cuts.axis_strides[axis];
  }
  return first;
}

std::vector<Interval> first_copies(const Shape& shape, const Mesh& mesh, const Layout& layout, int64_t rank) {
  mesh.coordinates(rank);
  const detail::Cuts cuts = detail::resolve(shape, mesh, layout);
  std::vector<Interval> first;
  for (size_t axis = 0; axis < cuts.uses.size(); ++axis)
    if (cuts.uses[axis] == detail::Use::replicated && cuts.coordinate(rank, static_cast<int64_t>(axis)) > 0) return first;
  int64_t end = 0;
  for (const detail::OwnedBox& owned : detail::owned_boxes(cuts, rank)) {
    const int64_t begin = end;
    end += numel(owned.box);
    if (!owned.first_copy) continue;
    if (!first.empty() && first.back().end == begin)
      first.back().end = end;
    else
      first.push_back({begin, end});
  }
  return first;
}

}  // namespace shardproof
