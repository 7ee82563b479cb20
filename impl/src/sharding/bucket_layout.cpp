#include "sharding/bucket_layout.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "shardproof/base/check.h"

namespace shardproof {
namespace {

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// The number of equal chunks that a layout's splits make.
int64_t chunks(const Layout& layout, const Mesh& mesh) {
  int64_t parts = 1;
  for (const Split& split : layout.flat) parts *= mesh.size(split.axis);
  return parts;
}

// A parameter along the dim that is cut: `outer` times `rows` rows of `inner` elements.
struct Rows {
  int64_t outer = 1, rows = 1, inner = 1;
};

Rows rows_along(const Shape& shape, int64_t dim) {
  Rows rows;
  for (int64_t d = 0; d < std::ssize(shape); ++d) (d < dim ? rows.outer : d == dim ? rows.rows : rows.inner) *= shape[d];
  return rows;
}

// On every rank along the axes that cut it before.
std::vector<Shape> shapes_of(const BucketParameter& member) {
  if (!member.is_cut()) return {member.shape};
  std::vector<Shape> shapes;
  for (int64_t part = 0; part < member.own.mesh.size(); ++part)
    shapes.push_back(local_shape(member.whole, member.own.mesh, member.own.layout, part));
  return shapes;
}

// The least multiple of `alignment` from `begin` on at which even chunks cut the member between granules; nothing where there
// is none. `next` becomes at most the least larger chunk with which the member would lie elsewhere from the cut before it.
std::optional<int64_t> offset_between_granules(const BucketParameter& member, int64_t begin, int64_t alignment, int64_t chunk,
                                               int64_t& next) {
  const int64_t step = std::lcm(alignment, member.granule);
  begin = round_up(begin, alignment);
  int64_t cut = round_up(begin, chunk);
  for (int attempt = 0; attempt < 2; ++attempt, begin = cut, cut += chunk) {
    const int64_t room = cut - begin, before = room / step * step;
    if (member.room <= room) return begin;
    next = std::min({next, chunk + before + step - room, chunk + member.room - room});
    if (before == 0) continue;
    if (member.room - before <= chunk) return cut - before;
    next = std::min(next, member.room - before);
    if (chunk % member.granule > 0) continue;  // the cuts behind that one would fall within granules
    next = chunk + 1;
    return cut - before;
  }
  return {};
}

bool is_cut_by(const Layout& layout, const std::string& axis) {
  return std::ranges::any_of(layout.flat, [&](const Split& split) { return split.axis == axis; });
}

void require_movable(const CollectiveStep& collective, const Strategy& strategy, const char* what) {
  SHARD_REQUIRE(collective.step == Step::none || collective.step == Step::all_gather, "strategy",
                "{}: {} is a {} step; parameters move by all_gather. Choose layouts that differ by innermost splits",
                strategy.name, what, to_string(collective.step));
}

}  // namespace

BucketLayout::BucketLayout(std::vector<BucketParameter> members, const Strategy& strategy, const Mesh& mesh, int64_t rank,
                           int64_t alignment_elements, bool by_rows, int64_t bucket_multiple)
    : mesh_(mesh), rank_(rank), members_(std::move(members)), by_offset_(members_.size()) {
  std::iota(by_offset_.begin(), by_offset_.end(), size_t{0});
  for (const Layout* layout :
       {&strategy.parameter, &strategy.compute, &strategy.produced, &strategy.accumulated, &strategy.state})
    SHARD_REQUIRE(layout->dims.empty(), "strategy", "{} splits a dim of its buckets in {}; name the axes in `flat` instead",
                  strategy.name, layout->str());
  int64_t multiple = bucket_multiple, cuts = 1;
  for (const Layout* layout : {&strategy.parameter, &strategy.accumulated, &strategy.state}) {
    cuts = std::lcm(cuts, chunks(*layout, mesh));
    multiple = std::lcm(multiple, chunks(*layout, mesh));
  }
  for (const std::string& axis : strategy.produced.partial)  // a sum over ranks that keep the same part has a slice for each
    if (!is_cut_by(strategy.state, axis)) multiple = std::lcm(multiple, cuts * mesh.size(axis));
  if (strategy.between) multiple = std::lcm(multiple, chunks(*strategy.between, mesh));
  if (by_rows && cuts > 1)
    place_rows(alignment_elements, strategy, cuts, multiple);
  else
    place(alignment_elements, strategy.between ? std::lcm(cuts, chunks(*strategy.between, mesh)) : cuts, multiple);

  whole_ = view(strategy.compute, mesh, rank);
  parameter_ = view(strategy.parameter, mesh, rank);
  accumulated_ = view(strategy.accumulated, mesh, rank);
  state_ = view(strategy.state, mesh, rank);
  SHARD_REQUIRE(whole_.size() == numel_ && view(strategy.produced, mesh, rank).size() == numel_, "strategy",
                "{} must compute on whole buckets and produce whole gradients", strategy.name);
  SHARD_REQUIRE(state_.interval.begin >= parameter_.interval.begin && state_.interval.end <= parameter_.interval.end,
                "strategy", "{}: the optimizer's part [{}, {}) of a bucket must lie in the parameters' part [{}, {})",
                strategy.name, state_.interval.begin, state_.interval.end, parameter_.interval.begin,
                parameter_.interval.end);

  const Shape shape{numel_};
  unshard_ = lower(shape, mesh, strategy.parameter, strategy.compute);
  all_gather_updated_ = lower(shape, mesh, strategy.state, strategy.parameter);
  require_movable(unshard_, strategy, "parameter -> compute");
  require_movable(all_gather_updated_, strategy, "state -> parameter");
  if (strategy.between) {
    between_ = {lower(shape, mesh, *strategy.between, strategy.compute), interval(*strategy.between, mesh, rank)};
    require_movable(between_->collective, strategy, "between -> compute");
  }
  reduce_ = sum_path(strategy.produced, strategy.accumulated, mesh, rank);
  reduce_last_ = sum_path(strategy.accumulated, strategy.state, mesh, rank);
}

int64_t BucketLayout::place_in_order(int64_t alignment) {
  int64_t end = 0;
  for (BucketParameter& member : members_) {
    member.offset = round_up(end, alignment);
    end = member.offset + member.room;
  }
  return end;
}

void BucketLayout::place(int64_t alignment, int64_t cuts, int64_t multiple) {
  const auto is_free = [](const BucketParameter& member) { return member.granule == 1; };
  const auto is_whole = [](const BucketParameter& member) { return member.granule >= member.room; };
  if (cuts == 1 || std::ranges::all_of(members_, is_free))
    numel_ = place_in_order(alignment);
  else
    numel_ = cuts * (std::ranges::all_of(members_, is_whole) ? place_whole(alignment, cuts, multiple)
                                                             : place_granules(alignment, cuts, multiple));
  numel_ = std::max(multiple, round_up(numel_, multiple));
  for (const size_t i : by_offset_)
    if (members_[i].numel > 0) placed_.push_back({static_cast<int64_t>(i), {0, members_[i].numel}, members_[i].offset});
}

// Returns the size of a chunk.
int64_t BucketLayout::place_granules(int64_t alignment, int64_t cuts, int64_t multiple) {
  const int64_t step = std::lcm(alignment, multiple / cuts), least = (place_in_order(alignment) + cuts - 1) / cuts;
  // The least chunk in which the greedy search succeeds. With those below `next` every member lies as far from a cut as before.
  for (int64_t chunk = round_up(least, step), next = 0;; chunk = round_up(next, step)) {
    int64_t end = 0;
    next = std::numeric_limits<int64_t>::max();
    const bool fits = std::ranges::all_of(members_, [&](BucketParameter& member) {
      const std::optional<int64_t> offset = offset_between_granules(member, end, alignment, chunk, next);
      if (offset) member.offset = *offset;
      end = member.offset + member.room;
      return offset && end <= cuts * chunk;
    });
    if (fits) return chunk;
  }
}

// Returns the size of a chunk.
int64_t BucketLayout::place_whole(int64_t alignment, int64_t cuts, int64_t multiple) {
  // Whole parameters into `cuts` equal chunks: the largest first, each where there is most room.
  std::stable_sort(by_offset_.begin(), by_offset_.end(),
                   [&](size_t a, size_t b) { return members_[a].room > members_[b].room; });
  std::vector<int64_t> filled(static_cast<size_t>(cuts), 0);
  std::vector<size_t> chunk_of(members_.size());
  for (const size_t index : by_offset_) {
    const auto emptiest = static_cast<size_t>(std::min_element(filled.begin(), filled.end()) - filled.begin());
    chunk_of[index] = emptiest;
    members_[index].offset = filled[emptiest];
    filled[emptiest] += round_up(members_[index].room, alignment);
  }
  const int64_t chunk = round_up(*std::max_element(filled.begin(), filled.end()), std::lcm(alignment, multiple / cuts));
  for (size_t i = 0; i < members_.size(); ++i) members_[i].offset += static_cast<int64_t>(chunk_of[i]) * chunk;
  std::stable_sort(by_offset_.begin(), by_offset_.end(),
                   [&](size_t a, size_t b) { return members_[a].offset < members_[b].offset; });
  return chunk;
}

void BucketLayout::place_rows(int64_t alignment, const Strategy& strategy, int64_t cuts, int64_t multiple) {
  // The rows of a chunk: cut along the axes of the state, the outermost first, as `owned` cuts a dim.
  const auto rows_of = [&](int64_t chunk, int64_t rows) {
    Interval part{0, rows};
    int64_t left = cuts;
    for (const Split& split : strategy.state.flat) {
      const int64_t parts = mesh_.size(split.axis);
      left /= parts;
      const Interval inner = piece(split, part.size(), parts, chunk / left % parts);
      part = {part.begin + inner.begin, part.begin + inner.end};
    }
    return part;
  };
  const int64_t compute = place_in_order(alignment);
  // No chunk has more rows than the first one, so what begins where it does there finds room in all.
  std::vector<int64_t> begins;
  int64_t chunk = 0;
  for (const BucketParameter& member : members_) {
    begins.push_back(round_up(chunk, alignment));
    for (const Shape& shape : shapes_of(member)) {
      const auto [outer, rows, inner] = rows_along(shape, member.cut_dim);
      chunk = std::max(chunk, begins.back() + outer * rows_of(0, rows).size() * inner);
    }
  }
  chunk = std::max(multiple / cuts, round_up(chunk, std::lcm(alignment, multiple / cuts)));
  numel_ = cuts * chunk;
  SHARD_CHECK(compute <= numel_, "bucket", "{} elements to compute with, in a bucket of {}", compute, numel_);
  is_by_rows_ = true;
  std::vector<size_t> blocks(members_.size(), 0);  // the number of each member's last block, from 1; 0: it has none yet
  for (int64_t c = 0; c < cuts; ++c)
    for (size_t i = 0; i < members_.size(); ++i) {
      const BucketParameter& member = members_[i];
      const auto [outer, rows, inner] = rows_along(member.shape, member.cut_dim);
      const Interval own = rows_of(c, rows);
      if (outer * own.size() * inner == 0) continue;
      placed_.push_back({.member = static_cast<int64_t>(i),
                         .run = {own.begin * inner, own.end * inner},
                         .local = c * chunk + begins[i],
                         .times = outer,
                         .stride = rows * inner});
      add_to_blocks(placed_.back(), chunk, blocks[i]);
    }
  is_interleaved_ = std::ranges::any_of(blocks_, [](const Block& block) {
    const Segment& first = block.first;
    return block.compute != first.local || (block.pieces > 1 && block.distance != first.run.size()) ||
           (first.times > 1 && first.stride != first.run.size());
  });
}

void BucketLayout::add_to_blocks(const Segment& segment, int64_t distance, size_t& last) {
  if (last > 0) {
    Block& block = blocks_[last - 1];
    if (block.first.run.size() == segment.run.size() && block.first.local + block.pieces * distance == segment.local) {
      ++block.pieces;
      return;
    }
  }
  blocks_.push_back({members_[static_cast<size_t>(segment.member)].offset + segment.run.begin, segment, 1, distance});
  last = blocks_.size();
}

void BucketLayout::each_block(const at::Tensor& compute, const at::Tensor& bucket,
                              const std::function<void(const at::Tensor&, const at::Tensor&)>& visit) const {
  SHARD_CHECK(compute.numel() == numel_ && bucket.numel() == numel_, "bucket", "buffers of {} and {} elements, expected {}",
              compute.numel(), bucket.numel(), numel_);
  for (const auto& [begin, first, pieces, distance] : blocks_) {
    const int64_t size = first.run.size();
    visit(compute.as_strided({pieces, first.times, size}, {size, first.stride, 1}, compute.storage_offset() + begin),
          bucket.as_strided({pieces, first.times, size}, {distance, size, 1}, bucket.storage_offset() + first.local));
  }
}

void BucketLayout::pack(const at::Tensor& compute, const at::Tensor& bucket) const {
  each_block(compute, bucket, [](const at::Tensor& from, const at::Tensor& to) { at::Tensor(to).copy_(from); });
}

void BucketLayout::unpack(const at::Tensor& bucket, const at::Tensor& compute) const {
  each_block(compute, bucket, [](const at::Tensor& to, const at::Tensor& from) { at::Tensor(to).copy_(from); });
}

Placement BucketLayout::placement(const BucketParameter& member, const LocalView& view) const {
  if (!is_by_rows_) return {mesh_, in_bucket(member.own.layout.dims, view.layout, {member.offset, numel_})};
  Layout layout{member.own.layout.dims, {}, view.layout.partial};
  for (const Split& split : view.layout.flat)
    layout = member.shape.empty() ? split_flat(std::move(layout), split) : split_dim(std::move(layout), member.cut_dim, split);
  return {mesh_, std::move(layout)};
}

std::vector<Stage> BucketLayout::sum_path(Layout from, const Layout& to, const Mesh& mesh, int64_t rank) const {
  std::vector<Stage> stages;
  std::vector<std::string> summed;
  for (const std::string& axis : from.partial)
    if (std::find(to.partial.begin(), to.partial.end(), axis) == to.partial.end()) summed.push_back(axis);
  std::sort(summed.begin(), summed.end(),
            [&](const std::string& a, const std::string& b) { return mesh.index(a) > mesh.index(b); });
  for (const std::string& axis : summed) {
    Layout next = from;
    std::erase(next.partial, axis);
    for (const Split& split : to.flat)
      if (split.axis == axis) next.flat.push_back(split);
    const CollectiveStep collective = lower({numel_}, mesh, from, next);
    SHARD_CHECK(collective.step == Step::none || collective.step == Step::all_reduce || collective.step == Step::reduce_scatter,
                "bucket", "a sum over {} collective to {}", axis, to_string(collective.step));
    if (collective.step != Step::none) stages.push_back({collective, view(next, mesh, rank)});
    from = std::move(next);
  }
  SHARD_REQUIRE(
      from == to, "strategy",
      "gradients pass from {} by sums over one mesh axis after the other, innermost first, which ends with {}, not {}. "
      "Name the splits of a layout innermost mesh axis first",
      stages.empty() ? "there" : "terms", from.str(), to.str());
  return stages;
}

LocalView BucketLayout::interval(const Layout& layout, const Mesh& mesh, int64_t rank) const {
  const std::vector<Box> boxes = owned({numel_}, mesh, layout, rank);
  SHARD_CHECK(boxes.size() <= 1, "bucket", "layout {} gives {} runs of a bucket", layout.str(), boxes.size());
  return {layout, boxes.empty() ? Interval{} : boxes[0][0], {}, {}};
}

LocalView BucketLayout::view(const Layout& layout, const Mesh& mesh, int64_t rank) const {
  LocalView view = interval(layout, mesh, rank);
  int64_t filled = view.interval.begin;
  for (const Segment& placed : placed_) {
    const int64_t begin = std::max(view.interval.begin, placed.local);
    const int64_t end = std::min(view.interval.end, placed.local + placed.size());
    if (begin >= end) continue;
    SHARD_CHECK(placed.times == 1 || end - begin == placed.size(), "bucket", "layout {} cuts a piece of {} elements",
                layout.str(), placed.size());
    if (filled < begin) view.padding.push_back({filled - view.interval.begin, begin - view.interval.begin});
    Segment& segment = view.segments.emplace_back(placed);
    segment.local = begin - view.interval.begin;
    if (placed.times == 1) segment.run = {placed.run.begin + begin - placed.local, placed.run.begin + end - placed.local};
    filled = end;
  }
  if (filled < view.interval.end) view.padding.push_back({filled - view.interval.begin, view.size()});
  return view;
}

std::vector<Shard> BucketLayout::shards(const LocalView& view, const at::Tensor& local) const {
  SHARD_CHECK(local.numel() == view.size(), "bucket", "a buffer of {} elements for a view of {}", local.numel(), view.size());
  std::vector<std::vector<at::Tensor>> parts(members_.size());
  for (const Segment& segment : view.segments)
    parts[static_cast<size_t>(segment.member)].push_back(
        local.narrow(0, segment.local, segment.size()).view({segment.times, segment.run.size()}));
  std::vector<Shard> shards;
  for (const size_t i : by_offset_) {
    const BucketParameter& member = members_[i];
    const at::Tensor data = parts[i].empty()       ? local.narrow(0, 0, 0)
                            : parts[i].size() == 1 ? parts[i][0]
                                                   : at::cat(parts[i], 1);
    shards.push_back({member.name, member.whole, placement(member, view), data.view({-1})});
  }
  return shards;
}

void append_pieces(const Shard& shard, int64_t rank, std::vector<Piece>& pieces) {
  for (const OwnedRun& run : owned_runs(shard.shape, shard.at.mesh, shard.at.layout, rank))
    pieces.push_back({shard.name, shard.shape, run.whole, shard.data.narrow(0, run.local, run.whole.size())});
}

}  // namespace shardproof
