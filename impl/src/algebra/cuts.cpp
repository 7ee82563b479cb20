#include "algebra/cuts.h"

#include <algorithm>

#include "shardproof/base/check.h"

namespace shardproof::detail {
namespace {

// ceil(length / parts), without overflow.
int64_t even_chunk(int64_t length, int64_t parts) {
  return length / parts + (length % parts != 0);
}

}  // namespace

Interval Cut::piece(int64_t length, int64_t part) const {
  if (!bounds.empty()) return {std::min(bounds[part], length), std::min(bounds[part + 1], length)};
  const int64_t chunk = even_chunk(length, parts);
  return {std::min(part * chunk, length), std::min((part + 1) * chunk, length)};
}

int64_t Cut::part_at(int64_t length, int64_t at) const {
  const int64_t part = bounds.empty()
                           ? at / even_chunk(length, parts)
                           : std::upper_bound(bounds.begin(), bounds.end(), at) - bounds.begin() - 1;
  SHARD_CHECK(0 <= part && part < parts, "layout", "index {} of {} lies in piece {} of {}", at, length, part,
              parts);
  return part;
}

int64_t Cut::piece_size_max(int64_t length) const {
  if (bounds.empty()) return piece(length, 0).size();
  int64_t size_max = 0;
  for (int64_t part = 0; part < parts; ++part) size_max = std::max(size_max, piece(length, part).size());
  return size_max;
}

int64_t Cuts::rank_count() const {
  int64_t count = 1;
  for (const int64_t size : axis_sizes) count *= size;
  return count;
}

Box region(const Cuts& cuts, int64_t rank) {
  Box box;
  box.reserve(cuts.shape.size());
  for (size_t d = 0; d < cuts.shape.size(); ++d) {
    Interval left{0, cuts.shape[d]};
    for (const Cut& cut : cuts.dims[d]) {
      const Interval piece = cut.piece(left.size(), cuts.coordinate(rank, cut.axis));
      left = {left.begin + piece.begin, left.begin + piece.end};
    }
    box.push_back(left);
  }
  return box;
}

Interval flat_run(const Cuts& cuts, int64_t region_numel, int64_t rank) {
  Interval left{0, region_numel};
  for (const Cut& cut : cuts.flat) {
    const Interval piece = cut.piece(left.size(), cuts.coordinate(rank, cut.axis));
    left = {left.begin + piece.begin, left.begin + piece.end};
  }
  return left;
}

std::vector<Box> owned(const Cuts& cuts, int64_t rank) {
  std::vector<Box> boxes;
  const Box box = region(cuts, rank);
  append_run(box, flat_run(cuts, numel(box), rank), boxes);
  return boxes;
}

namespace {

// `prefix` holds the intervals of the dims before `dim`; `run` counts elements within one index of dim `dim -
// 1`.
void append_run_from(const Box& region, size_t dim, Interval run, Box& prefix, std::vector<Box>& boxes) {
  if (run.size() == 0) return;
  if (dim == region.size()) return boxes.push_back(prefix);
  int64_t row = 1;  // elements under one index of `dim`
  for (size_t d = dim + 1; d < region.size(); ++d) row *= region[d].size();
  const auto within_row = [&](int64_t index, Interval part) {
    prefix.push_back({region[dim].begin + index, region[dim].begin + index + 1});
    append_run_from(region, dim + 1, part, prefix, boxes);
    prefix.pop_back();
  };
  const int64_t first = run.begin / row, last = (run.end - 1) / row;
  if (first == last && run.size() < row)
    return within_row(first, {run.begin - first * row, run.end - first * row});
  const int64_t whole_begin = (run.begin + row - 1) / row, whole_end = run.end / row;
  if (first < whole_begin) within_row(first, {run.begin - first * row, row});
  if (whole_begin < whole_end) {
    Box box = prefix;
    box.push_back({region[dim].begin + whole_begin, region[dim].begin + whole_end});
    box.insert(box.end(), region.begin() + dim + 1, region.end());
    boxes.push_back(std::move(box));
  }
  if (whole_end <= last) within_row(last, {0, run.end - last * row});
}

// The smallest offset >= `at` in the row-major order of `region` at which an element of `box` lies; past the
// region's end when there is none. `box` lies in `region` and neither is empty.
int64_t next_offset(const Box& region, const Box& box, int64_t at) {
  const size_t dims = region.size();
  int64_t stride = numel(region);
  if (at >= stride) return at;
  int64_t left = at, offset = 0;  // offset of the indices chosen so far, all equal to those of `at`
  int64_t next_larger = stride;   // the answer if an index chosen so far must grow instead
  const auto first_from = [&](size_t dim,
                              int64_t row) {  // offset of the box's first element within dims >= dim
    int64_t sum = 0;
    for (size_t d = dim; d < dims; ++d) {
      row /= region[d].size();
      sum += (box[d].begin - region[d].begin) * row;
    }
    return sum;
  };
  for (size_t d = 0; d < dims; ++d) {
    const int64_t row = stride / region[d].size();
    const int64_t index = left / row, low = box[d].begin - region[d].begin,
                  high = box[d].end - region[d].begin;
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
  HolderWalk(const Cuts& cuts, const Box& wanted, const std::vector<int64_t>& fixed, const VisitHolder& visit)
      : cuts_(cuts),
        wanted_(wanted),
        fixed_(fixed),
        visit_(visit),
        region_(wanted.size()),
        shared_(wanted.size()) {}

  void dim(size_t d, int64_t rank) {
    if (d == wanted_.size()) return flat(0, {0, numel(region_)}, rank);
    cut_dim(d, 0, {0, cuts_.shape[d]}, rank);
  }

 private:
  void cut_dim(size_t d, size_t level, Interval left, int64_t rank) {
    const Interval want{std::max(left.begin, wanted_[d].begin), std::min(left.end, wanted_[d].end)};
    if (want.size() <= 0) return;
    if (level == cuts_.dims[d].size()) {
      region_[d] = left;
      shared_[d] = want;
      return dim(d + 1, rank);
    }
    const Cut& cut = cuts_.dims[d][level];
    const auto enter = [&](int64_t part) {
      const Interval piece = cut.piece(left.size(), part);
      cut_dim(d, level + 1, {left.begin + piece.begin, left.begin + piece.end}, rank_with(rank, cut, part));
      return left.begin + piece.end;
    };
    if (fixed_[cut.axis] >= 0) return void(enter(fixed_[cut.axis]));
    for (int64_t at = want.begin; at < want.end;)
      at = past(at, enter(cut.part_at(left.size(), at - left.begin)));
  }

  // `left` in the row-major order of region_.
  void flat(size_t level, Interval left, int64_t rank) {
    if (level == cuts_.flat.size()) return emit(left, rank);
    const Cut& cut = cuts_.flat[level];
    const auto enter = [&](int64_t part) {
      const Interval piece = cut.piece(left.size(), part);
      flat(level + 1, {left.begin + piece.begin, left.begin + piece.end}, rank_with(rank, cut, part));
      return left.begin + piece.end;
    };
    if (fixed_[cut.axis] >= 0) return void(enter(fixed_[cut.axis]));
    for (int64_t at = left.begin;;) {
      const int64_t next = next_offset(region_, shared_, at);
      SHARD_CHECK(next >= at, "layout", "the element at or after offset {} is at {}", at, next);
      if (next >= left.end) return;
      at = past(next, enter(cut.part_at(left.size(), next - left.begin)));
    }
  }

  void emit(Interval run, int64_t rank) {
    if (cuts_.flat.empty()) return visit_(rank, shared_);
    boxes_.clear();
    append_run(region_, run, boxes_);
    for (Box& box : boxes_)
      if (intersect(box, shared_)) visit_(rank, box);
  }

  static int64_t past(int64_t at, int64_t end) {
    SHARD_CHECK(end > at, "layout", "the piece that holds {} ends at {}", at, end);
    return end;
  }

  int64_t rank_with(int64_t rank, const Cut& cut, int64_t part) const {
    return rank + part * cuts_.axis_strides[cut.axis];
  }

  const Cuts& cuts_;
  const Box& wanted_;
  const std::vector<int64_t>& fixed_;
  const VisitHolder& visit_;
  Box region_;              // what the splits of dims entered so far leave
  Box shared_;              // region_ and wanted_
  std::vector<Box> boxes_;  // scratch
};

}  // namespace

void append_run(const Box& region, Interval run, std::vector<Box>& boxes) {
  Box prefix;
  append_run_from(region, 0, run, prefix, boxes);
}

bool intersect(Box& box, const Box& other) {
  for (size_t d = 0; d < box.size(); ++d) {
    box[d] = {std::max(box[d].begin, other[d].begin), std::min(box[d].end, other[d].end)};
    if (box[d].size() <= 0) return false;
  }
  return true;
}

void for_each_holder(const Cuts& cuts, const Box& wanted, const std::vector<int64_t>& fixed,
                     const VisitHolder& visit) {
  HolderWalk(cuts, wanted, fixed, visit).dim(0, 0);
}

}  // namespace shardproof::detail
