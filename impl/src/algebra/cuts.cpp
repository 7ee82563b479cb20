#include "algebra/cuts.h"

#include <algorithm>

#include "shardproof/base/check.h"

namespace shardproof::detail {
namespace {

// The strips that `runs` of the local numbering of `outer` leave. `copy`: see for_each_holder.
std::vector<Strip> narrowed(const std::vector<Strip>& outer, const std::vector<SplitRun>& runs, int64_t part, int64_t copy) {
  std::vector<Strip> strips;
  int64_t local = 0;
  for (const SplitRun& run : runs) {
    const bool taken = copy == kAny || part % run.copies == copy % run.copies;
    for (const Strip& strip : outer) {
      const int64_t begin = std::max(run.whole.begin, strip.local);
      const int64_t end = std::min(run.whole.end, strip.local + strip.whole.size());
      if (begin >= end) continue;
      const int64_t first = strip.whole.begin + begin - strip.local;
      strips.push_back({{first, first + end - begin}, local, strip.first_copy && run.first_copy, strip.taken && taken});
      local += end - begin;
    }
  }
  return strips;
}

std::vector<Strip> all_of(int64_t length) {
  return length == 0 ? std::vector<Strip>{} : std::vector<Strip>{{{0, length}}};
}

int64_t size_of(const std::vector<Strip>& strips) {
  return strips.empty() ? 0 : strips.back().local + strips.back().whole.size();
}

Interval shared(Interval a, Interval b) { return {std::max(a.begin, b.begin), std::min(a.end, b.end)}; }

}  // namespace

int64_t Cuts::rank_count() const {
  int64_t count = 1;
  for (const int64_t size : axis_sizes) count *= size;
  return count;
}

bool Cuts::has_copies() const {
  for (const auto& cuts : dims)
    for (const Cut& cut : cuts)
      for (const CutSegment& segment : cut.split->segments)
        if (segment.copied && segment.length / segment.granule < cut.parts) return true;
  return false;
}

Shape local_shape(const Region& region) {
  Shape shape;
  for (const auto& strips : region) shape.push_back(size_of(strips));
  return shape;
}

Region region(const Cuts& cuts, int64_t rank) {
  Region region;
  region.reserve(cuts.shape.size());
  for (size_t d = 0; d < cuts.shape.size(); ++d) {
    std::vector<Strip> left = all_of(cuts.shape[d]);
    for (const Cut& cut : cuts.dims[d]) {
      const int64_t part = cuts.coordinate(rank, cut.axis);
      left = narrowed(left, cut.pieces(size_of(left), part), part, kAny);
    }
    region.push_back(std::move(left));
  }
  return region;
}

Interval flat_run(const Cuts& cuts, int64_t region_numel, int64_t rank) {
  Interval left = cuts.flat_space(region_numel);
  for (const Cut& cut : cuts.flat) {
    const Interval piece = cut.piece(left.size(), cuts.coordinate(rank, cut.axis));
    left = {left.begin + piece.begin, left.begin + piece.end};
  }
  return {std::clamp<int64_t>(left.begin, 0, region_numel), std::clamp<int64_t>(left.end, 0, region_numel)};
}

std::vector<OwnedBox> owned_boxes(const Cuts& cuts, int64_t rank) {
  std::vector<OwnedBox> boxes;
  const Region held = region(cuts, rank);
  append_run(held, flat_run(cuts, numel(local_shape(held)), rank), nullptr, boxes);
  return boxes;
}

std::vector<Box> owned(const Cuts& cuts, int64_t rank) {
  std::vector<OwnedBox> with_copies = owned_boxes(cuts, rank);
  std::vector<Box> boxes;
  boxes.reserve(with_copies.size());
  for (OwnedBox& owned : with_copies) boxes.push_back(std::move(owned.box));
  return boxes;
}

namespace {

// Walks a run of the row-major order of a region dim by dim.
class RunWalk {
 public:
  RunWalk(const Region& region, const Box* wanted, std::vector<OwnedBox>& boxes)
      : region_(region), wanted_(wanted), boxes_(boxes), rows_(region.size() + 1, 1), solid_(region.size() + 1, true) {
    for (size_t d = region.size(); d-- > 0;) {
      rows_[d] = rows_[d + 1] * size_of(region[d]);
      solid_[d] = solid_[d + 1] && region[d].size() == 1;
    }
  }

  // `run` counts elements within one index of dim `dim - 1`.
  void walk(size_t dim, Interval run, bool first_copy) {
    if (run.size() <= 0) return;
    if (dim == region_.size()) return boxes_.push_back({prefix_, first_copy});
    const int64_t row = rows_[dim + 1];
    const int64_t first = run.begin / row, last = (run.end - 1) / row;
    if (first == last && run.size() < row)
      return rows(dim, {first, first + 1}, {run.begin - first * row, run.end - first * row}, first_copy);
    const int64_t whole_begin = (run.begin + row - 1) / row, whole_end = run.end / row;
    if (first < whole_begin) rows(dim, {first, first + 1}, {run.begin - first * row, row}, first_copy);
    rows(dim, {whole_begin, whole_end}, {0, row}, first_copy);
    if (whole_end <= last) rows(dim, {last, last + 1}, {0, run.end - last * row}, first_copy);
  }

 private:
  Interval clipped(size_t dim, Interval interval) const { return wanted_ ? shared(interval, (*wanted_)[dim]) : interval; }

  // Of each of the local `indices` of `dim` the elements `part`.
  void rows(size_t dim, Interval indices, Interval part, bool first_copy) {
    for (const Strip& strip : region_[dim]) {
      if (!strip.taken) continue;
      const Interval local = shared(indices, {strip.local, strip.local + strip.whole.size()});
      if (local.size() <= 0) continue;
      const int64_t to_whole = strip.whole.begin - strip.local;
      const Interval whole = clipped(dim, {local.begin + to_whole, local.end + to_whole});
      if (whole.size() <= 0) continue;
      const bool first = first_copy && strip.first_copy;
      if (part == Interval{0, rows_[dim + 1]} && solid_[dim + 1]) {
        append_block(dim, whole, first);
        continue;
      }
      for (int64_t index = whole.begin; index < whole.end; ++index) {
        prefix_.push_back({index, index + 1});
        walk(dim + 1, part, first);
        prefix_.pop_back();
      }
    }
  }

  void append_block(size_t dim, Interval whole, bool first_copy) {
    OwnedBox block{prefix_, first_copy};
    block.box.push_back(whole);
    for (size_t d = dim + 1; d < region_.size(); ++d) {
      const Strip& strip = region_[d].front();
      if (!strip.taken) return;
      block.box.push_back(clipped(d, strip.whole));
      block.first_copy &= strip.first_copy;
      if (block.box.back().size() <= 0) return;
    }
    boxes_.push_back(std::move(block));
  }

  const Region& region_;
  const Box* wanted_;
  std::vector<OwnedBox>& boxes_;
  std::vector<int64_t> rows_;  // elements of the dims from this one on
  std::vector<bool> solid_;    // the dims from this one on have one strip each
  Box prefix_;
};

// The smallest offset >= `at` in the row-major order of `region` at which an element of `box` lies; past the
// region's end when there is none. `box` is in local indices, lies in the region and neither is empty.
int64_t next_offset(const Shape& region, const Box& box, int64_t at) {
  const size_t dims = region.size();
  int64_t stride = numel(region);
  if (at >= stride) return at;
  int64_t left = at, offset = 0;  // offset of the indices chosen so far, all equal to those of `at`
  int64_t next_larger = stride;   // the answer if an index chosen so far must grow instead
  const auto first_from = [&](size_t dim,
                              int64_t row) {  // offset of the box's first element within dims >= dim
    int64_t sum = 0;
    for (size_t d = dim; d < dims; ++d) {
      row /= region[d];
      sum += box[d].begin * row;
    }
    return sum;
  };
  for (size_t d = 0; d < dims; ++d) {
    const int64_t row = stride / region[d];
    const int64_t index = left / row, low = box[d].begin, high = box[d].end;
    if (index < low) return offset + first_from(d, stride);
    if (index >= high) return next_larger;
    if (index + 1 < high) next_larger = offset + (index + 1) * row + first_from(d + 1, row);
    offset += index * row;
    left -= index * row;
    stride = row;
  }
  return offset;
}

class HolderWalk {
 public:
  HolderWalk(const Cuts& cuts, const Box& wanted, const std::vector<int64_t>& fixed, const std::vector<int64_t>& copies,
             const VisitHolder& visit)
      : cuts_(cuts),
        wanted_(wanted),
        fixed_(fixed),
        copies_(copies),
        visit_(visit),
        region_(wanted.size()),
        shared_(wanted.size()) {}

  void dim(size_t d, int64_t rank) {
    if (d < wanted_.size()) return cut_dim(d, 0, all_of(cuts_.shape[d]), rank);
    local_shape_ = local_shape(region_);
    shared_boxes_ = {{}};
    for (const auto& intervals : shared_) {
      std::vector<Box> longer;
      for (const Box& box : shared_boxes_)
        for (const Interval& interval : intervals) {
          longer.push_back(box);
          longer.back().push_back(interval);
        }
      shared_boxes_ = std::move(longer);
    }
    flat(0, cuts_.flat_space(numel(local_shape_)), rank);
  }

 private:
  // The local intervals of `strips` that are wanted in dim `d`.
  std::vector<Interval> wanted_of(size_t d, const std::vector<Strip>& strips) const {
    std::vector<Interval> intervals;
    for (const Strip& strip : strips) {
      const Interval want = shared(strip.whole, wanted_[d]);
      if (!strip.taken || want.size() <= 0) continue;
      const int64_t to_local = strip.local - strip.whole.begin;
      intervals.push_back({want.begin + to_local, want.end + to_local});
    }
    return intervals;
  }

  void cut_dim(size_t d, size_t level, const std::vector<Strip>& left, int64_t rank) {
    std::vector<Interval> want = wanted_of(d, left);
    if (want.empty()) return;
    if (level == cuts_.dims[d].size()) {
      region_[d] = left;
      shared_[d] = std::move(want);
      return dim(d + 1, rank);
    }
    const Cut& cut = cuts_.dims[d][level];
    const int64_t length = size_of(left), copy = copies_[cut.axis];
    const auto enter = [&](int64_t part) {
      cut_dim(d, level + 1, narrowed(left, cut.pieces(length, part), part, copy), rank_with(rank, cut, part));
    };
    if (fixed_[cut.axis] >= 0) return enter(fixed_[cut.axis]);
    for (const int64_t part : cut.holders(length, want, copy)) enter(part);
  }

  // `left` in the row-major order of region_, or of the bucket around it.
  void flat(size_t level, Interval left, int64_t rank) {
    const Interval inside = shared(left, {0, numel(local_shape_)});
    if (inside.size() <= 0) return;
    if (level == cuts_.flat.size()) return emit(inside, rank);
    const Cut& cut = cuts_.flat[level];
    const auto enter = [&](int64_t part) {
      const Interval piece = cut.piece(left.size(), part);
      flat(level + 1, {left.begin + piece.begin, left.begin + piece.end}, rank_with(rank, cut, part));
      return left.begin + piece.end;
    };
    if (fixed_[cut.axis] >= 0) return void(enter(fixed_[cut.axis]));
    for (int64_t at = inside.begin; at < inside.end;) {
      const int64_t next = next_wanted(at, inside.end);
      SHARD_CHECK(next >= at, "layout", "the element at or after offset {} is at {}", at, next);
      if (next >= inside.end) return;
      at = enter(cut.part_at(left.size(), next - left.begin));
      SHARD_CHECK(at > next, "layout", "the piece that holds {} ends at {}", next, at);
    }
  }

  int64_t next_wanted(int64_t at, int64_t end) const {
    int64_t next = end;
    for (const Box& box : shared_boxes_) next = std::min(next, next_offset(local_shape_, box, at));
    return next;
  }

  void emit(Interval run, int64_t rank) {
    std::vector<OwnedBox> boxes;
    RunWalk(region_, &wanted_, boxes).walk(0, run, true);
    for (const OwnedBox& owned : boxes) visit_(rank, owned.box);
  }

  int64_t rank_with(int64_t rank, const Cut& cut, int64_t part) const { return rank + part * cuts_.axis_strides[cut.axis]; }

  const Cuts& cuts_;
  const Box& wanted_;
  const std::vector<int64_t>&fixed_, &copies_;
  const VisitHolder& visit_;
  Region region_;                              // what the splits of dims entered so far leave
  std::vector<std::vector<Interval>> shared_;  // what of it is wanted, in local indices
  Shape local_shape_;                          // of region_
  std::vector<Box> shared_boxes_;              // the products of shared_
};

}  // namespace

void append_run(const Region& region, Interval run, const Box* wanted, std::vector<OwnedBox>& boxes) {
  RunWalk(region, wanted, boxes).walk(0, run, true);
}

void for_each_holder(const Cuts& cuts, const Box& wanted, const std::vector<int64_t>& fixed,
                     const std::vector<int64_t>& copies, const VisitHolder& visit) {
  HolderWalk(cuts, wanted, fixed, copies, visit).dim(0, 0);
}

}  // namespace shardproof::detail
