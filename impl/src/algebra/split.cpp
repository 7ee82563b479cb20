#include "shardproof/algebra/split.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "algebra/split_rules.h"
#include "shardproof/base/check.h"

namespace shardproof {
namespace {

// ceil(length / parts), without overflow.
int64_t even_chunk(int64_t length, int64_t parts) { return length / parts + (length % parts != 0); }

Interval even_piece(int64_t length, int64_t parts, int64_t part) {
  const int64_t chunk = even_chunk(length, parts);
  return {std::min(part * chunk, length), std::min((part + 1) * chunk, length)};
}

int64_t granules(const CutSegment& segment) { return segment.length / segment.granule; }

int64_t copies_of(const CutSegment& segment, int64_t parts) {
  const int64_t count = granules(segment);
  return !segment.copied || count == 0 || count >= parts ? 1 : parts / count;
}

Interval piece_of(const CutSegment& segment, int64_t parts, int64_t part) {
  const int64_t copies = copies_of(segment, parts), count = granules(segment);
  const Interval own = even_piece(count, copies == 1 ? parts : count, part / copies);
  return {own.begin * segment.granule, own.end * segment.granule};
}

void append(std::vector<SplitRun>& runs, Interval whole, int64_t copies, bool first_copy) {
  if (whole.size() <= 0) return;
  int64_t local = 0;
  if (!runs.empty()) {
    SplitRun& last = runs.back();
    if (last.whole.end == whole.begin && last.copies == copies) return void(last.whole.end = whole.end);
    local = last.local + last.whole.size();
  }
  runs.push_back({whole, local, copies, first_copy});
}

// parts + 1 ascending points from 0.
bool are_bounds(const std::vector<int64_t>& bounds, int64_t parts) {
  return std::ssize(bounds) == parts + 1 && bounds.front() == 0 && std::is_sorted(bounds.begin(), bounds.end());
}

std::string misfit_of_segments(const Split& split, int64_t length, int64_t parts, const std::string& what, bool clamps) {
  int64_t total = 0;
  for (const CutSegment& segment : split.segments) {
    if (segment.length < 0 || segment.granule < 1 || segment.length % segment.granule != 0)
      return fmt::format("{}: a segment of {} rows cannot be cut in granules of {}", what, segment.length, segment.granule);
    const int64_t count = granules(segment);
    if (segment.copied && count != 0 && count < parts && parts % count != 0)
      return fmt::format(
          "{}: {} granules (heads) on {} ranks; where there are fewer, they must divide the ranks so that each is held by as "
          "many",
          what, count, parts);
    total += segment.length;
  }
  if (clamps ? total < length : total != length)
    return fmt::format("{}: segments have {} rows in total, and the length is {}", what, total, length);
  return {};
}

void require_part(const Split& split, int64_t length, int64_t parts, int64_t part) {
  SHARD_REQUIRE(length >= 0 && parts >= 1 && part >= 0 && part < parts, "layout",
                "there is no piece {} of a length of {} cut into {}; pieces count from 0 (axis `{}`)", part, length, parts,
                split.axis);
  const std::string error = detail::misfit(split, length, parts, "a length", /*clamps=*/true);
  SHARD_REQUIRE(error.empty(), "layout", "{}", error);
}

}  // namespace

Interval detail::Cut::piece(int64_t length, int64_t part) const {
  const std::vector<int64_t>& bounds = split->bounds;
  if (!bounds.empty()) return {std::min(bounds[part], length), std::min(bounds[part + 1], length)};
  return even_piece(length, parts, part);
}

std::vector<SplitRun> detail::Cut::pieces(int64_t length, int64_t part) const {
  std::vector<SplitRun> runs;
  if (split->balanced) {
    append(runs, even_piece(length, 2 * parts, part), 1, true);
    append(runs, even_piece(length, 2 * parts, 2 * parts - 1 - part), 1, true);
  } else if (!split->segments.empty()) {
    int64_t begin = 0;
    for (const CutSegment& segment : split->segments) {
      const Interval own = piece_of(segment, parts, part);
      const int64_t copies = copies_of(segment, parts);
      append(runs, {std::min(begin + own.begin, length), std::min(begin + own.end, length)}, copies, part % copies == 0);
      begin += segment.length;
    }
  } else {
    append(runs, piece(length, part), 1, true);
  }
  return runs;
}

int64_t detail::Cut::piece_size(int64_t length, int64_t part) const {
  if (split->is_contiguous()) return piece(length, part).size();
  int64_t size = 0;
  for (const SplitRun& run : pieces(length, part)) size += run.whole.size();
  return size;
}

int64_t detail::Cut::piece_size_max(int64_t length) const {
  if (split->is_contiguous() && split->bounds.empty()) return even_chunk(length, parts);
  int64_t size_max = 0;
  for (int64_t part = 0; part < parts; ++part) size_max = std::max(size_max, piece_size(length, part));
  return size_max;
}

int64_t detail::Cut::part_at(int64_t length, int64_t at) const {
  const std::vector<int64_t>& bounds = split->bounds;
  const int64_t part = bounds.empty() ? at / even_chunk(length, parts)
                                      : std::upper_bound(bounds.begin(), bounds.end(), at) - bounds.begin() - 1;
  SHARD_CHECK(0 <= part && part < parts, "layout", "index {} of {} lies in piece {} of {}", at, length, part, parts);
  return part;
}

std::vector<int64_t> detail::Cut::holders(int64_t length, const std::vector<Interval>& wanted, int64_t copy) const {
  std::vector<int64_t> holders;
  const auto add_of_segments = [&](Interval run) {
    int64_t begin = 0;
    for (const CutSegment& segment : split->segments) {
      const Interval shared{std::max(run.begin, begin), std::min(run.end, begin + segment.length)};
      if (shared.size() > 0) {
        const int64_t copies = copies_of(segment, parts), count = granules(segment);
        const int64_t chunk = even_chunk(count, copies == 1 ? parts : count) * segment.granule;
        for (int64_t part = (shared.begin - begin) / chunk; part <= (shared.end - 1 - begin) / chunk; ++part)
          for (int64_t c = 0; c < copies; ++c)
            if (copy == kAny || c == copy % copies) holders.push_back(part * copies + c);
      }
      begin += segment.length;
    }
  };
  for (const Interval& run : wanted) {
    if (split->balanced) {
      const int64_t chunk = even_chunk(length, 2 * parts);
      for (int64_t i = run.begin / chunk; i <= (run.end - 1) / chunk; ++i) holders.push_back(std::min(i, 2 * parts - 1 - i));
    } else if (!split->segments.empty()) {
      add_of_segments(run);
    } else {
      for (int64_t at = run.begin; at < run.end;) {
        holders.push_back(part_at(length, at));
        const int64_t end = piece(length, holders.back()).end;
        SHARD_CHECK(end > at, "layout", "the piece that holds {} ends at {}", at, end);
        at = end;
      }
    }
  }
  std::sort(holders.begin(), holders.end());
  holders.erase(std::unique(holders.begin(), holders.end()), holders.end());
  return holders;
}

int64_t detail::Cut::copies(int64_t length) const {
  const std::vector<SplitRun> runs = pieces(length, 0);
  const bool alike = std::all_of(runs.begin(), runs.end(), [&](const SplitRun& run) { return run.copies == runs[0].copies; });
  return runs.empty() || !alike ? 1 : runs[0].copies;
}

std::string detail::misfit(const Split& split, int64_t length, int64_t parts, const std::string& what, bool clamps) {
  const int rules = static_cast<int>(!split.bounds.empty()) + static_cast<int>(!split.segments.empty()) + split.balanced;
  if (rules > 1) return fmt::format("{}: split {} has more than one of bounds, segments and balanced", what, split.str());
  if (!split.segments.empty())
    return misfit_of_segments(split, length, parts, fmt::format("axis `{}` on {}", split.axis, what), clamps);
  if (split.bounds.empty()) return {};
  const bool fits = are_bounds(split.bounds, parts) && (clamps ? split.bounds.back() >= length : split.bounds.back() == length);
  if (fits) return {};
  return fmt::format("the bounds of axis `{}` on {} must be {} ascending points from 0 to {}, got {}", split.axis, what,
                     parts + 1, length, fmt::join(split.bounds, "|"));
}

std::string Split::str() const {
  std::string text = axis;
  if (!bounds.empty()) text += fmt::format(":{}", fmt::join(bounds, "|"));
  for (size_t i = 0; i < segments.size(); ++i)
    text += fmt::format("{}{}/{}{}", i == 0 ? ":" : "+", segments[i].length, segments[i].granule,
                        segments[i].copied ? "*" : "");
  return balanced ? text + ":balanced" : text;
}

Split split_in_segments(std::string axis, std::vector<CutSegment> segments) {
  return {std::move(axis), {}, std::move(segments), false};
}

Split balanced_split(std::string axis) { return {std::move(axis), {}, {}, true}; }

std::vector<SplitRun> pieces(const Split& split, int64_t length, int64_t parts, int64_t part) {
  require_part(split, length, parts, part);
  return detail::Cut{.parts = parts, .split = &split}.pieces(length, part);
}

int64_t piece_size(const Split& split, int64_t length, int64_t parts, int64_t part) {
  require_part(split, length, parts, part);
  return detail::Cut{.parts = parts, .split = &split}.piece_size(length, part);
}

Interval piece(const Split& split, int64_t length, int64_t parts, int64_t part) {
  SHARD_REQUIRE(split.is_contiguous(), "layout",
                "piece asks for one run a part, and split {} may give several; use an even or a ragged split, or `pieces`",
                split.str());
  require_part(split, length, parts, part);
  return detail::Cut{.parts = parts, .split = &split}.piece(length, part);
}

std::vector<int64_t> DimCut::positions(int64_t part) const {
  std::vector<int64_t> positions;
  for (const SplitRun& run : runs(part))
    for (int64_t position = run.whole.begin; position < run.whole.end; ++position) positions.push_back(position);
  return positions;
}

int64_t copies_held(const Split& split, int64_t parts) {
  int64_t copies = 1;
  for (const CutSegment& segment : split.segments) {
    const int64_t own = copies_of(segment, parts);
    SHARD_REQUIRE(copies == 1 || own == 1 || own == copies, "layout",
                  "segments of split {} are held in {} and in {} copies on {} ranks; give them the same number of granules",
                  split.str(), copies, own, parts);
    copies = std::max(copies, own);
  }
  return copies;
}

void validate(const Split& split, int64_t length, int64_t parts, const std::string& what) {
  const std::string error = detail::misfit(split, length, parts, what);
  SHARD_REQUIRE(error.empty(), "layout", "{}", error);
}

}  // namespace shardproof
