// Each step of `lower` by its definition, over lists of pieces.
#include <algorithm>
#include <map>

#include "properties/kit/spec_layout.h"

namespace shardproof::spec {
namespace {

int64_t count(const Shape& shape) {
  int64_t product = 1;
  for (const int64_t size : shape) product *= size;
  return product;
}

// Sizes before, along and after a dim; everything is along kFlat.
struct Strides {
  int64_t outer, along, inner;
};

std::optional<Strides> strides(const Shape& shape, int64_t dim) {
  if (dim == kFlat) return Strides{1, count(shape), 1};
  if (dim >= static_cast<int64_t>(shape.size())) return std::nullopt;
  return Strides{count(Shape(shape.begin(), shape.begin() + dim)), shape[dim],
                 count(Shape(shape.begin() + dim + 1, shape.end()))};
}

std::optional<Local> concatenated(const std::vector<Local>& pieces, int64_t dim) {
  const auto first = strides(pieces[0].shape, dim);
  if (!first) return std::nullopt;
  Local whole{pieces[0].shape, {}};
  if (dim == kFlat) whole.shape = {0};
  int64_t& along = whole.shape[dim == kFlat ? 0 : dim];
  along = 0;
  for (const Local& piece : pieces) {
    const auto its = strides(piece.shape, dim);
    if (!its || its->outer != first->outer || its->inner != first->inner) return std::nullopt;
    along += its->along;
  }
  for (int64_t outer = 0; outer < first->outer; ++outer)
    for (const Local& piece : pieces) {
      const int64_t run = strides(piece.shape, dim)->along * first->inner;
      whole.values.insert(whole.values.end(), piece.values.begin() + outer * run,
                          piece.values.begin() + (outer + 1) * run);
    }
  return whole;
}

std::optional<std::vector<Local>> cut(const Local& whole, int64_t dim, const std::vector<int64_t>& sizes) {
  const auto its = strides(whole.shape, dim);
  int64_t sum = 0;
  for (const int64_t size : sizes) sum += size;
  if (!its || sum != its->along) return std::nullopt;
  std::vector<Local> pieces;
  int64_t begin = 0;
  for (const int64_t size : sizes) {
    Local piece{dim == kFlat ? Shape{size} : whole.shape, {}};
    piece.shape[dim == kFlat ? 0 : dim] = size;
    for (int64_t outer = 0; outer < its->outer; ++outer)
      for (int64_t i = 0; i < size * its->inner; ++i)
        piece.values.push_back(whole.values[(outer * its->along + begin) * its->inner + i]);
    pieces.push_back(piece);
    begin += size;
  }
  return pieces;
}

std::optional<Local> summed(const std::vector<Local>& pieces) {
  Local sum = pieces[0];
  for (size_t i = 1; i < pieces.size(); ++i) {
    if (pieces[i].shape != sum.shape) return std::nullopt;
    for (size_t e = 0; e < sum.values.size(); ++e)
      sum.values[e].insert(sum.values[e].end(), pieces[i].values[e].begin(), pieces[i].values[e].end());
  }
  return sum;
}

// One group of ranks at work on one step. `to` has the shapes and elements of what is wanted, `elements` of
// what is there.
struct Group {
  std::vector<int64_t> ranks;
  std::vector<Local> pieces, elements, elements_to;

  std::vector<int64_t> sizes_to(int64_t dim) const {
    std::vector<int64_t> sizes;
    for (const Local& piece : elements_to) {
      const auto its = strides(piece.shape, dim);
      sizes.push_back(its ? its->along : -1);
    }
    return sizes;
  }
};

std::optional<std::vector<Local>> everyone(const Group& group, const std::optional<Local>& value) {
  if (!value) return std::nullopt;
  return std::vector<Local>(group.ranks.size(), *value);
}

std::optional<std::vector<Local>> reduce_scatter(const Group& group, int64_t dim) {
  const auto sum = summed(group.pieces);
  return sum ? cut(*sum, dim, group.sizes_to(dim)) : std::nullopt;
}

// Between two dims: slice j of every old piece, concatenated.
std::optional<std::vector<Local>> exchange_slices(const Group& group, int64_t dim, int64_t dim_to) {
  std::vector<std::vector<Local>> received(group.ranks.size());
  for (const Local& piece : group.pieces) {
    const auto slices = cut(piece, dim_to, group.sizes_to(dim_to));
    if (!slices) return std::nullopt;
    for (size_t j = 0; j < received.size(); ++j) received[j].push_back((*slices)[j]);
  }
  std::vector<Local> results;
  for (const auto& slices : received) {
    const auto whole = concatenated(slices, dim);
    if (!whole) return std::nullopt;
    results.push_back(*whole);
  }
  return results;
}

std::optional<std::vector<Local>> all_to_all(const Group& group, int64_t dim, int64_t dim_to) {
  const auto region = concatenated(group.elements, dim), region_to = concatenated(group.elements_to, dim_to);
  if (!region || !region_to || region->values != region_to->values) return std::nullopt;
  if (dim != dim_to && dim != kFlat && dim_to != kFlat) return exchange_slices(group, dim, dim_to);
  std::map<Terms, Terms> value_of;
  for (size_t i = 0; i < group.pieces.size(); ++i)
    for (size_t e = 0; e < group.pieces[i].values.size(); ++e)
      value_of[group.elements[i].values[e]] = group.pieces[i].values[e];
  std::vector<Local> results = group.elements_to;
  for (Local& result : results)
    for (Terms& value : result.values) value = value_of.at(value);
  return results;
}

// Each rank for itself; `fresh` says whether it keeps the value along axes that become partial.
std::optional<std::vector<Local>> slice(const Group& group, bool keeps) {
  Local result = group.elements_to[0];
  for (Terms& value : result.values) {
    const auto at = std::find(group.elements[0].values.begin(), group.elements[0].values.end(), value);
    if (at == group.elements[0].values.end()) return std::nullopt;
    value = keeps ? group.pieces[0].values[at - group.elements[0].values.begin()] : Terms{};
  }
  return std::vector<Local>{result};
}

bool keeps_value(const Scene& scene, int64_t rank) {
  const std::vector<int64_t> at = coordinates(scene.mesh, rank);
  for (size_t i = 0; i < at.size(); ++i) {
    const auto has = [&](const Layout& layout) {
      return std::count(layout.partial.begin(), layout.partial.end(), scene.mesh.axes()[i].name) > 0;
    };
    if (has(scene.to) && !has(scene.from) && at[i] != 0) return false;
  }
  return true;
}

}  // namespace

Scene scene(const Shape& shape, const Mesh& mesh, const Layout& from, const Layout& to) {
  const auto elements = [&](Layout layout) {  // as if they were values
    layout.partial.clear();
    return start(shape, {mesh, layout});
  };
  return {mesh, from, to, start(shape, {mesh, from}), elements(from), elements(to)};
}

std::optional<World> run(const CollectiveStep& step, const Scene& scene) {
  const bool alone = step.step == Step::none || step.step == Step::slice;
  World results(scene.values.size());
  for (int64_t rank = 0; rank < scene.mesh.size(); ++rank) {
    Group members{group(scene.mesh, rank, alone ? std::vector<std::string>{} : step.axes), {}, {}, {}};
    if (members.ranks[0] != rank) continue;  // the group's first member works for all
    for (const int64_t member : members.ranks) {
      members.pieces.push_back(scene.values[member]);
      members.elements.push_back(scene.elements[member]);
      members.elements_to.push_back(scene.elements_to[member]);
    }
    std::optional<std::vector<Local>> made;
    switch (step.step) {
      case Step::none:
        made = members.pieces;
        break;
      case Step::slice:
        made = slice(members, keeps_value(scene, rank));
        break;
      case Step::all_gather:
        made = everyone(members, concatenated(members.pieces, step.dim));
        break;
      case Step::all_reduce:
        made = everyone(members, summed(members.pieces));
        break;
      case Step::reduce_scatter:
        made = reduce_scatter(members, step.dim);
        break;
      case Step::all_to_all:
        made = all_to_all(members, step.dim, step.dim_to);
        break;
      case Step::general:
        return std::nullopt;
    }
    if (!made) return std::nullopt;
    for (size_t i = 0; i < members.ranks.size(); ++i) results[members.ranks[i]] = (*made)[i];
  }
  return results;
}

}  // namespace shardproof::spec
