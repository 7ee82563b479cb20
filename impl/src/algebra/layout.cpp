#include "shardproof/algebra/layout.h"

#include <algorithm>
#include <set>

#include "algebra/cuts.h"
#include "shardproof/base/check.h"

namespace shardproof {
namespace {

std::string joined(const std::vector<int64_t>& numbers, const char* separator) {
  std::string text;
  for (const int64_t number : numbers) text += fmt::format("{}{}", text.empty() ? "" : separator, number);
  return text;
}

std::string str(const std::vector<Split>& splits) {
  std::string text;
  for (const Split& split : splits) {
    text += (text.empty() ? "" : ",") + split.axis;
    if (!split.bounds.empty()) text += ":" + joined(split.bounds, "|");
  }
  return "[" + text + "]";
}

detail::Cut cut_of(const Split& split, int64_t axis, int64_t parts) {
  return {axis, parts, split.bounds};
}

// parts + 1 ascending points from 0.
bool are_bounds(const std::vector<int64_t>& bounds, int64_t parts) {
  return static_cast<int64_t>(bounds.size()) == parts + 1 && bounds.front() == 0 &&
         std::is_sorted(bounds.begin(), bounds.end());
}

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
    detail::Cuts cuts{shape_, {}, {}, {}, std::vector<std::vector<detail::Cut>>(shape_.size()), {}};
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
    cuts.flat = cuts_of(layout_.flat, region_numel_max, "the flat run");
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
      require(split.bounds.empty() || (are_bounds(split.bounds, parts) && split.bounds.back() == length),
              [&] {
                return fmt::format(
                    "the bounds of axis `{}` on {} must be {} ascending points from 0 to {}, got {}",
                    split.axis, what, parts + 1, length, joined(split.bounds, "|"));
              });
      cuts.push_back(cut_of(split, axis, parts));
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
                  mesh_.str(), joined(shape_, ","));
  }

  const Shape& shape_;
  const Mesh& mesh_;
  const Layout& layout_;
  std::vector<detail::Use> uses_;
};

// The lengths that the pieces of some `lengths` can have.
std::set<int64_t> piece_sizes(const detail::Cut& cut, const std::set<int64_t>& lengths) {
  std::set<int64_t> sizes;
  for (const int64_t length : lengths)
    for (int64_t part = 0; part < cut.parts; ++part) sizes.insert(cut.piece(length, part).size());
  return sizes;
}

bool equals_even(const detail::Cut& cut, const std::set<int64_t>& lengths) {
  const detail::Cut even{cut.axis, cut.parts, {}};
  for (const int64_t length : lengths)
    for (int64_t part = 0; part < cut.parts; ++part)
      if (!(cut.piece(length, part) == even.piece(length, part))) return false;
  return true;
}

// Drops axes of size 1 and makes ragged cuts that equal the even one even; leaves in `lengths` those of the
// last pieces.
std::vector<Split> canonical_splits(const Mesh& mesh, const std::vector<Split>& splits,
                                    std::set<int64_t>& lengths) {
  std::vector<Split> kept;
  for (const Split& split : splits) {
    const detail::Cut cut = cut_of(split, 0, mesh.size(split.axis));
    if (cut.parts == 1) continue;
    kept.push_back(equals_even(cut, lengths) ? Split{split.axis, {}} : split);
    lengths = piece_sizes(cut, lengths);
  }
  return kept;
}

bool any_ragged(const std::vector<Split>& splits) {
  return std::any_of(splits.begin(), splits.end(), [](const Split& split) { return !split.bounds.empty(); });
}

void drop_empty_tail(std::vector<std::vector<Split>>& dims) {
  while (!dims.empty() && dims.back().empty()) dims.pop_back();
}

}  // namespace

detail::Cuts detail::resolve(const Shape& shape, const Mesh& mesh, const Layout& layout) {
  return Resolver(shape, mesh, layout).resolve();
}

Interval piece(const Split& split, int64_t length, int64_t parts, int64_t part) {
  SHARD_REQUIRE(length >= 0 && parts >= 1 && part >= 0 && part < parts, "layout",
                "there is no piece {} of a length of {} cut into {}; pieces count from 0 (axis `{}`)", part,
                length, parts, split.axis);
  SHARD_REQUIRE(split.bounds.empty() || (are_bounds(split.bounds, parts) && split.bounds.back() >= length),
                "layout", "the bounds of axis `{}` must be {} ascending points from 0 to {}, got {}",
                split.axis, parts + 1, length, joined(split.bounds, "|"));
  return cut_of(split, 0, parts).piece(length, part);
}

Split within(const Split& split, int64_t length, int64_t parts, Interval window) {
  SHARD_REQUIRE(0 <= window.begin && window.begin <= window.end && window.end <= length, "layout",
                "window [{}, {}) is not a part of a length of {} (axis `{}`)", window.begin, window.end,
                length, split.axis);
  Split inner{split.axis, {0}};
  for (int64_t part = 0; part < parts; ++part)
    inner.bounds.push_back(std::clamp(piece(split, length, parts, part).end, window.begin, window.end) -
                           window.begin);
  return inner;
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

void validate(const Shape& shape, const Mesh& mesh, const Layout& layout) {
  detail::resolve(shape, mesh, layout);
}

Layout canonical(const Shape& shape, const Mesh& mesh, const Layout& layout) {
  validate(shape, mesh, layout);
  Layout source = layout, made;
  source.dims.resize(shape.size());
  if (shape.size() == 1) {
    source.dims[0].insert(source.dims[0].end(), source.flat.begin(), source.flat.end());
    source.flat.clear();
  }
  const bool flat_ragged = any_ragged(source.flat);
  std::set<int64_t> numels{1};  // of the regions; followed only where ragged flat bounds ask
  for (size_t d = 0; d < shape.size(); ++d) {
    std::set<int64_t> lengths{shape[d]};
    made.dims.push_back(canonical_splits(mesh, source.dims[d], lengths));
    if (!flat_ragged) continue;
    std::set<int64_t> products;
    for (const int64_t count : numels)
      for (const int64_t length : lengths) products.insert(count * length);
    numels = std::move(products);
  }
  made.flat = canonical_splits(mesh, source.flat, numels);
  drop_empty_tail(made.dims);
  for (const std::string& axis : source.partial)
    if (mesh.size(axis) > 1) made.partial.push_back(axis);
  std::sort(made.partial.begin(), made.partial.end());
  return made;
}

Box region(const Shape& shape, const Mesh& mesh, const Layout& layout, int64_t rank) {
  mesh.coordinates(rank);  // refuses a rank outside the mesh
  return detail::region(detail::resolve(shape, mesh, layout), rank);
}

Interval flat_run(const Shape& shape, const Mesh& mesh, const Layout& layout, int64_t rank) {
  mesh.coordinates(rank);
  const detail::Cuts cuts = detail::resolve(shape, mesh, layout);
  return detail::flat_run(cuts, numel(detail::region(cuts, rank)), rank);
}

std::vector<Box> owned(const Shape& shape, const Mesh& mesh, const Layout& layout, int64_t rank) {
  mesh.coordinates(rank);
  return detail::owned(detail::resolve(shape, mesh, layout), rank);
}

int64_t owned_numel(const Shape& shape, const Mesh& mesh, const Layout& layout, int64_t rank) {
  return flat_run(shape, mesh, layout, rank).size();
}

}  // namespace shardproof
