#include "bucket_layout.h"

#include <algorithm>
#include <numeric>

#include "shardproof/check.h"

namespace shardproof {
namespace {

int64_t round_up(int64_t value, int64_t multiple) { return (value + multiple - 1) / multiple * multiple; }

// The number of equal chunks that a layout's splits make.
int64_t chunks(const Layout& layout, const Mesh& mesh) {
  int64_t parts = 1;
  for (const auto& dim : layout.dims)
    for (const Split& split : dim) parts *= mesh.size(split.axis);
  for (const Split& split : layout.flat) parts *= mesh.size(split.axis);
  return parts;
}

}  // namespace

BucketLayout::BucketLayout(std::vector<Slot> slots, const Strategy& strategy, const Mesh& mesh, int64_t rank,
                           int64_t alignment_elements)
    : slots_(std::move(slots)) {
  for (Slot& slot : slots_) {
    slot.offset = round_up(numel_, alignment_elements);
    numel_ = slot.offset + slot.numel;
  }
  int64_t multiple = 1;
  for (const Layout* layout : {&strategy.parameter, &strategy.compute, &strategy.accumulated, &strategy.state})
    multiple = std::lcm(multiple, chunks(*layout, mesh));
  numel_ = round_up(numel_, multiple);

  parameter_ = view(strategy.parameter, mesh, rank);
  compute_ = view(strategy.compute, mesh, rank);
  produced_ = view(strategy.produced, mesh, rank);
  accumulated_ = view(strategy.accumulated, mesh, rank);
  state_ = view(strategy.state, mesh, rank);
  SHARD_REQUIRE(compute_.size() == numel_ && produced_.size() == numel_, "strategy",
                "{} must compute on whole buckets and produce whole gradients", strategy.name);
  SHARD_REQUIRE(state_.interval.begin >= parameter_.interval.begin && state_.interval.end <= parameter_.interval.end,
                "strategy", "{}: the optimizer's part [{}, {}) of a bucket must lie in the parameters' part [{}, {})",
                strategy.name, state_.interval.begin, state_.interval.end, parameter_.interval.begin,
                parameter_.interval.end);

  const Shape shape{numel_};
  unshard_ = lower(shape, mesh, strategy.parameter, strategy.compute);
  reduce_ = lower(shape, mesh, strategy.produced, strategy.accumulated);
  reduce_last_ = lower(shape, mesh, strategy.accumulated, strategy.state);
  publish_ = lower(shape, mesh, strategy.state, strategy.parameter);
}

LocalView BucketLayout::view(const Layout& layout, const Mesh& mesh, int64_t rank) const {
  const std::vector<Box> boxes = owned({numel_}, mesh, layout, rank);
  SHARD_CHECK(boxes.size() <= 1, "bucket", "layout {} gives {} runs of a bucket", layout.str(), boxes.size());
  LocalView view;
  if (!boxes.empty()) view.interval = boxes[0][0];
  int64_t filled = view.interval.begin;
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    const int64_t begin = std::max(view.interval.begin, slot.offset);
    const int64_t end = std::min(view.interval.end, slot.offset + slot.numel);
    if (begin >= end) continue;
    if (filled < begin) view.padding.push_back({filled - view.interval.begin, begin - view.interval.begin});
    view.segments.push_back({static_cast<int64_t>(i), {begin - slot.offset, end - slot.offset}, begin - view.interval.begin});
    filled = end;
  }
  if (filled < view.interval.end) view.padding.push_back({filled - view.interval.begin, view.size()});
  return view;
}

void append_pieces(const BucketLayout& layout, const LocalView& view, const at::Tensor& local, std::vector<Piece>& pieces) {
  SHARD_CHECK(local.numel() == view.size(), "bucket", "a buffer of {} elements for a view of {}", local.numel(), view.size());
  for (const Segment& segment : view.segments) {
    const Slot& slot = layout.slots()[segment.slot];
    pieces.push_back({slot.name, slot.shape, segment.run, local.narrow(0, segment.local, segment.run.size())});
  }
}

}  // namespace shardproof
