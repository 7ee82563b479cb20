#include "shardproof/algebra/tensor_cut.h"

#include <algorithm>

#include "shardproof/base/check.h"

namespace shardproof {
namespace {

int64_t granules(const CutSegment& segment) { return segment.length / segment.granule; }

int64_t copies_of(const CutSegment& segment, int64_t parts) {
  const int64_t count = granules(segment);
  return !segment.copied || count == 0 || count >= parts ? 1 : parts / count;
}

Interval piece_of(const CutSegment& segment, int64_t parts, int64_t part) {
  const int64_t copies = copies_of(segment, parts), count = granules(segment);
  const Interval own = piece({}, count, copies == 1 ? parts : count, part / copies);
  return {own.begin * segment.granule, own.end * segment.granule};
}

}  // namespace

std::vector<CutRows> TensorCut::rows(int64_t parts, int64_t part) const {
  std::vector<CutRows> rows;
  int64_t begin = 0, held = 0;
  for (const CutSegment& segment : segments) {
    const Interval own = piece_of(segment, parts, part);
    rows.push_back({{held, held + own.size()}, {begin + own.begin, begin + own.end}, part % copies_of(segment, parts) == 0});
    begin += segment.length;
    held += own.size();
  }
  return rows;
}

int64_t TensorCut::copies(int64_t parts) const {
  int64_t copies = 1;
  for (const CutSegment& segment : segments) {
    const int64_t own = copies_of(segment, parts);
    SHARD_REQUIRE(copies == 1 || own == 1 || own == copies, "tensor_cut",
                  "segments are held in {} and in {} copies on {} ranks; give them the same number of granules", copies, own,
                  parts);
    copies = std::max(copies, own);
  }
  return copies;
}

Shape TensorCut::local_shape(const Shape& whole, int64_t parts, int64_t part) const {
  Shape shape = whole;
  shape[dim] = 0;
  for (const CutRows& own : rows(parts, part)) shape[dim] += own.local.size();
  return shape;
}

std::vector<CutRun> TensorCut::runs(const Shape& whole, int64_t parts, int64_t part, Interval local) const {
  const std::vector<CutRows> own = rows(parts, part);
  int64_t outer = 1, inner = 1;
  for (int64_t d = 0; d < std::ssize(whole); ++d) (d < dim ? outer : inner) *= d == dim ? 1 : whole[d];
  const int64_t held = own.back().local.end * inner, length = whole[dim] * inner;
  std::vector<CutRun> runs;
  if (held == 0 || local.size() <= 0) return runs;
  for (int64_t o = local.begin / held; o < outer && o * held < local.end; ++o)
    for (const CutRows& rows_here : own) {
      const int64_t first = o * held + rows_here.local.begin * inner;
      const int64_t begin = std::max(local.begin, first), end = std::min(local.end, o * held + rows_here.local.end * inner);
      if (begin >= end) continue;
      const int64_t at = o * length + rows_here.whole.begin * inner + begin - first;
      runs.push_back({{at, at + end - begin}, begin, rows_here.first_copy});
    }
  return runs;
}

void validate(const TensorCut& cut, const Shape& whole, int64_t parts, const std::string& what) {
  SHARD_REQUIRE(cut.dim >= 0 && cut.dim < std::ssize(whole), "tensor_parallel", "{} has {} dims; it cannot be cut along dim {}",
                what, whole.size(), cut.dim);
  int64_t total = 0;
  for (const CutSegment& segment : cut.segments) {
    SHARD_REQUIRE(segment.length >= 0 && segment.granule >= 1 && segment.length % segment.granule == 0, "tensor_parallel",
                  "{}: a segment of {} rows cannot be cut in granules of {}", what, segment.length, segment.granule);
    const int64_t count = granules(segment);
    SHARD_REQUIRE(
        !segment.copied || count == 0 || count >= parts || parts % count == 0, "tensor_parallel",
        "{}: {} granules (heads) on {} ranks; where there are fewer, they must divide the ranks so that each is held by "
        "as many",
        what, count, parts);
    total += segment.length;
  }
  SHARD_REQUIRE(total == whole[cut.dim], "tensor_parallel", "{}: segments have {} rows in total, dim {} has {}", what, total,
                cut.dim, whole[cut.dim]);
  cut.copies(parts);
}

}  // namespace shardproof
