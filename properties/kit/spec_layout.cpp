#include "properties/kit/spec_layout.h"

#include <algorithm>
#include <map>
#include <stdexcept>

namespace shardproof::spec {
namespace {

constexpr int64_t kTermsMax = 4096;  // terms of one element have numbers below this

int64_t axis_at(const Mesh& mesh, const std::string& name) {
  for (size_t i = 0; i < mesh.axes().size(); ++i)
    if (mesh.axes()[i].name == name) return i;
  throw std::logic_error("no axis " + name);
}

// Members of chunks that are as small as `parts` chunks can be.
int64_t chunk_size(int64_t count, int64_t parts) {
  int64_t chunk = 0;
  while (chunk * parts < count) ++chunk;
  return chunk;
}

// Whether index `at` of `length` is one of those of `part`.
bool is_dealt_to(const Split& split, int64_t length, int64_t parts, int64_t part, int64_t at) {
  if (!split.bounds.empty()) return split.bounds[part] <= at && at < split.bounds[part + 1];
  if (split.balanced) {
    const int64_t chunk = at / chunk_size(length, 2 * parts);
    return chunk == part || chunk == 2 * parts - 1 - part;
  }
  if (split.segments.empty()) return at / chunk_size(length, parts) == part;
  size_t segment = 0;
  for (; at >= split.segments[segment].length; ++segment) at -= split.segments[segment].length;
  const CutSegment& its = split.segments[segment];
  int64_t count = 0;
  while (count * its.granule < its.length) ++count;
  const int64_t granule = at / its.granule;
  int64_t holders = 1;  // neighbours that hold the same
  while (its.copied && count * (holders + 1) <= parts) ++holders;
  return holders > 1 ? part / holders == granule : granule / chunk_size(count, parts) == part;
}

// Deals the members of a list to the parts, in order, and keeps those of one part.
std::vector<int64_t> dealt(const std::vector<int64_t>& list, const Split& split, int64_t parts, int64_t part) {
  std::vector<int64_t> kept;
  for (int64_t i = 0; i < static_cast<int64_t>(list.size()); ++i)
    if (is_dealt_to(split, list.size(), parts, part, i)) kept.push_back(list[i]);
  return kept;
}

std::vector<int64_t> dealt(std::vector<int64_t> list, const std::vector<Split>& splits, const Mesh& mesh,
                           int64_t rank) {
  const std::vector<int64_t> at = coordinates(mesh, rank);
  for (const Split& split : splits) {
    const int64_t axis = axis_at(mesh, split.axis);
    list = dealt(list, split, mesh.axes()[axis].size, at[axis]);
  }
  return list;
}

// Per dim, the indices that the splits of dims leave.
std::vector<std::vector<int64_t>> kept_indices(const Shape& shape, const Mesh& mesh, const Layout& layout,
                                               int64_t rank) {
  std::vector<std::vector<int64_t>> kept;
  for (size_t d = 0; d < shape.size(); ++d) {
    std::vector<int64_t> indices;
    for (int64_t i = 0; i < shape[d]; ++i) indices.push_back(i);
    kept.push_back(d < layout.dims.size() ? dealt(indices, layout.dims[d], mesh, rank) : indices);
  }
  return kept;
}

std::vector<int64_t> row_major(const Shape& shape, const std::vector<std::vector<int64_t>>& indices) {
  std::vector<int64_t> offsets{0};
  for (size_t d = 0; d < shape.size(); ++d) {
    std::vector<int64_t> longer;
    for (const int64_t offset : offsets)
      for (const int64_t index : indices[d]) longer.push_back(offset * shape[d] + index);
    offsets = longer;
  }
  return offsets;
}

bool is_partial(const Layout& layout, const std::string& axis) {
  return std::find(layout.partial.begin(), layout.partial.end(), axis) != layout.partial.end();
}

// The number of a rank's term among those of one element.
int64_t term_number(const Placement& placement, int64_t rank) {
  const std::vector<int64_t> at = coordinates(placement.mesh, rank);
  int64_t number = 0;
  for (size_t i = 0; i < at.size(); ++i) {
    const Axis& axis = placement.mesh.axes()[i];
    if (is_partial(placement.layout, axis.name)) number = number * axis.size + at[i];
  }
  return number;
}

void append(Terms& terms, const Terms& more) {
  terms.insert(terms.end(), more.begin(), more.end());
}

World empty_world(const Shape& shape, const Placement& placement) {
  World world;
  for (int64_t rank = 0; rank < placement.mesh.size(); ++rank) {
    Local local{spec::local_shape(shape, placement.mesh, placement.layout, rank), {}};
    local.values.resize(held(shape, placement.mesh, placement.layout, rank).size());
    world.push_back(local);
  }
  return world;
}

}  // namespace

std::vector<int64_t> coordinates(const Mesh& mesh, int64_t rank) {
  std::vector<int64_t> at(mesh.axes().size(), 0);
  for (; rank > 0; --rank)
    for (size_t i = at.size(); i-- > 0;) {
      if (++at[i] < mesh.axes()[i].size) break;
      at[i] = 0;
    }
  return at;
}

std::vector<int64_t> group(const Mesh& mesh, int64_t rank, const std::vector<std::string>& axes) {
  std::vector<std::pair<std::vector<int64_t>, int64_t>> members;
  std::vector<int64_t> mine = coordinates(mesh, rank);
  for (const std::string& axis : axes) mine[axis_at(mesh, axis)] = 0;
  for (int64_t other = 0; other < mesh.size(); ++other) {
    std::vector<int64_t> theirs = coordinates(mesh, other), along;
    for (const std::string& axis : axes) {
      along.push_back(theirs[axis_at(mesh, axis)]);
      theirs[axis_at(mesh, axis)] = 0;
    }
    if (theirs == mine) members.push_back({along, other});
  }
  std::sort(members.begin(), members.end());
  std::vector<int64_t> ranks;
  for (const auto& [along, member] : members) ranks.push_back(member);
  return ranks;
}

std::vector<int64_t> dealt(const Split& split, int64_t length, int64_t parts, int64_t part) {
  std::vector<int64_t> all;
  for (int64_t i = 0; i < length; ++i) all.push_back(i);
  return dealt(all, split, parts, part);
}

Shape local_shape(const Shape& shape, const Mesh& mesh, const Layout& layout, int64_t rank) {
  if (!layout.flat.empty()) return {static_cast<int64_t>(held(shape, mesh, layout, rank).size())};
  Shape local;
  for (const auto& indices : kept_indices(shape, mesh, layout, rank)) local.push_back(indices.size());
  return local;
}

std::vector<int64_t> held(const Shape& shape, const Mesh& mesh, const Layout& layout, int64_t rank) {
  const std::vector<int64_t> elements = row_major(shape, kept_indices(shape, mesh, layout, rank));
  if (layout.bucket.length == 0) return dealt(elements, layout.flat, mesh, rank);
  std::vector<int64_t> bucket(layout.bucket.length, -1);  // -1: not of this tensor
  for (size_t i = 0; i < elements.size(); ++i) bucket[layout.bucket.offset + i] = elements[i];
  std::vector<int64_t> kept;
  for (const int64_t element : dealt(bucket, layout.flat, mesh, rank))
    if (element >= 0) kept.push_back(element);
  return kept;
}

std::vector<int64_t> offsets(const Shape& shape, const Box& box) {
  std::vector<std::vector<int64_t>> indices(box.size());
  for (size_t d = 0; d < box.size(); ++d)
    for (int64_t i = box[d].begin; i < box[d].end; ++i) indices[d].push_back(i);
  return row_major(shape, indices);
}

bool same_values(const World& a, const World& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const Local& x, const Local& y) { return x.values == y.values; });
}

World start(const Shape& shape, const Placement& placement) {
  World world = empty_world(shape, placement);
  for (int64_t rank = 0; rank < placement.mesh.size(); ++rank) {
    const std::vector<int64_t> elements = held(shape, placement.mesh, placement.layout, rank);
    for (size_t i = 0; i < elements.size(); ++i)
      world[rank].values[i] = {elements[i] * kTermsMax + term_number(placement, rank)};
  }
  return world;
}

World wanted(const Shape& shape, const Placement& from, const Placement& to) {
  World world = empty_world(shape, to);
  const bool same_mesh = from.mesh == to.mesh;
  for (int64_t target = 0; target < to.mesh.size(); ++target) {
    const std::vector<int64_t> at = coordinates(to.mesh, target);
    bool zero = false;  // the sum is kept at coordinate 0 of an axis that becomes partial
    for (size_t i = 0; i < at.size(); ++i) {
      const std::string& axis = to.mesh.axes()[i].name;
      zero |= is_partial(to.layout, axis) && !(same_mesh && is_partial(from.layout, axis)) && at[i] != 0;
    }
    std::vector<int64_t> numbers;  // of the terms to sum, ascending by the rank that holds them
    for (int64_t source = 0; source < from.mesh.size() && !zero; ++source) {
      const std::vector<int64_t> its = coordinates(from.mesh, source);
      bool counts = true;
      for (size_t i = 0; i < its.size(); ++i) {
        const std::string& axis = from.mesh.axes()[i].name;
        if (!is_partial(from.layout, axis))
          counts &= its[i] == 0;  // one of those that differ along other axes
        else if (same_mesh && is_partial(to.layout, axis))
          counts &= its[i] == at[i];
      }
      if (counts) numbers.push_back(term_number(from, source));
    }
    const std::vector<int64_t> elements = held(shape, to.mesh, to.layout, target);
    for (size_t i = 0; i < elements.size(); ++i)
      for (const int64_t number : numbers)
        world[target].values[i].push_back(elements[i] * kTermsMax + number);
  }
  return world;
}

World execute(const Shape& shape, const Placement& from, const Placement& to,
              const std::vector<Transfer>& transfers, const World& world) {
  const auto positions = [&](const Placement& placement) {
    std::vector<std::map<int64_t, size_t>> at(placement.mesh.size());
    for (int64_t rank = 0; rank < placement.mesh.size(); ++rank) {
      size_t i = 0;
      for (const int64_t element : held(shape, placement.mesh, placement.layout, rank))
        at[rank][element] = i++;
    }
    return at;
  };
  const auto source_at = positions(from), target_at = positions(to);
  World result = empty_world(shape, to);
  for (const Transfer& transfer : transfers)
    for (const int64_t element : offsets(shape, transfer.box)) {
      const auto source = source_at.at(transfer.source).find(element);
      const auto target = target_at.at(transfer.target).find(element);
      if (source == source_at[transfer.source].end())
        throw std::logic_error("a transfer reads what its source lacks");
      if (target == target_at[transfer.target].end())
        throw std::logic_error("a transfer writes what its target lacks");
      append(result[transfer.target].values[target->second], world[transfer.source].values[source->second]);
    }
  return result;
}

}  // namespace shardproof::spec
