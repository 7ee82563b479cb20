#include "sharding/bucket_layout.h"

#include <algorithm>
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
                           int64_t alignment_elements, Granularity granularity, int64_t bucket_multiple)
    : mesh_(mesh), rank_(rank), members_(std::move(members)) {
  for (const Layout* layout :
       {&strategy.parameter, &strategy.compute, &strategy.produced, &strategy.accumulated, &strategy.state})
    SHARD_REQUIRE(layout->dims.empty(), "strategy", "{} splits a dim of its buckets in {}; name the axes in `flat` instead",
                  strategy.name, layout->str());
  int64_t multiple = bucket_multiple, cuts = 1;
  for (const Layout* layout : {&strategy.parameter, &strategy.accumulated, &strategy.state}) {
    cuts = std::max(cuts, chunks(*layout, mesh));
    multiple = std::lcm(multiple, chunks(*layout, mesh));
  }
  for (const std::string& axis : strategy.produced.partial)  // a sum over ranks that keep the same part has a slice for each
    if (!is_cut_by(strategy.state, axis)) multiple = std::lcm(multiple, cuts * mesh.size(axis));
  if (strategy.between) multiple = std::lcm(multiple, chunks(*strategy.between, mesh));
  place(alignment_elements, cuts, multiple, granularity);
  numel_ = std::max(multiple, round_up(numel_, multiple));

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
    between_ = {lower(shape, mesh, *strategy.between, strategy.compute), view(*strategy.between, mesh, rank)};
    require_movable(between_->collective, strategy, "between -> compute");
  }
  reduce_ = sum_path(strategy.produced, strategy.accumulated, mesh, rank);
  reduce_last_ = sum_path(strategy.accumulated, strategy.state, mesh, rank);
}

void BucketLayout::place(int64_t alignment, int64_t cuts, int64_t multiple, Granularity granularity) {
  by_offset_.resize(members_.size());
  std::iota(by_offset_.begin(), by_offset_.end(), size_t{0});
  if (granularity == Granularity::element || cuts == 1) {
    for (BucketParameter& member : members_) {
      member.offset = round_up(numel_, alignment);
      numel_ = member.offset + member.room;
    }
    return;
  }
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
  numel_ = cuts * chunk;
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

LocalView BucketLayout::view(const Layout& layout, const Mesh& mesh, int64_t rank) const {
  const std::vector<Box> boxes = owned({numel_}, mesh, layout, rank);
  SHARD_CHECK(boxes.size() <= 1, "bucket", "layout {} gives {} runs of a bucket", layout.str(), boxes.size());
  LocalView view{layout, {}, {}, {}};
  if (!boxes.empty()) view.interval = boxes[0][0];
  int64_t filled = view.interval.begin;
  for (const size_t i : by_offset_) {
    const BucketParameter& member = members_[i];
    const int64_t begin = std::max(view.interval.begin, member.offset);
    const int64_t end = std::min(view.interval.end, member.offset + member.numel);
    if (begin >= end) continue;
    if (filled < begin) view.padding.push_back({filled - view.interval.begin, begin - view.interval.begin});
    view.segments.push_back(
        {static_cast<int64_t>(i), {begin - member.offset, end - member.offset}, begin - view.interval.begin});
    filled = end;
  }
  if (filled < view.interval.end) view.padding.push_back({filled - view.interval.begin, view.size()});
  return view;
}

std::vector<Shard> BucketLayout::shards(const LocalView& view, const at::Tensor& local) const {
  SHARD_CHECK(local.numel() == view.size(), "bucket", "a buffer of {} elements for a view of {}", local.numel(), view.size());
  std::vector<Shard> shards;
  for (const size_t i : by_offset_) {
    const BucketParameter& member = members_[i];
    const int64_t begin = std::clamp(member.offset, view.interval.begin, view.interval.end);
    const int64_t end = std::clamp(member.offset + member.numel, begin, view.interval.end);
    shards.push_back(
        {member.name, member.whole, placement(member, view), local.narrow(0, begin - view.interval.begin, end - begin)});
  }
  return shards;
}

void append_pieces(const Shard& shard, int64_t rank, std::vector<Piece>& pieces) {
  for (const OwnedRun& run : owned_runs(shard.shape, shard.at.mesh, shard.at.layout, rank))
    pieces.push_back({shard.name, shard.shape, run.whole, shard.data.narrow(0, run.local, run.whole.size())});
}

}  // namespace shardproof
