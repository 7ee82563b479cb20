#include "shardproof/algebra/context_cut.h"

#include "shardproof/base/check.h"

namespace shardproof {

std::vector<Interval> ContextCut::runs(int64_t rank) const {
  SHARD_REQUIRE(length >= 0 && rank >= 0 && rank < ranks, "context_cut",
                "a length of at least 0 and a rank below {} are needed, got length {} and rank {}", ranks, length, rank);
  std::vector<Interval> chunks;
  if (split == ContextSplit::contiguous)
    chunks = {piece({}, length, ranks, rank)};
  else
    chunks = {piece({}, length, 2 * ranks, rank), piece({}, length, 2 * ranks, 2 * ranks - 1 - rank)};
  std::vector<Interval> runs;
  for (const Interval& chunk : chunks) {
    if (chunk.size() == 0) continue;
    // The chunks of the last rank are neighbours; so is everything on a single one.
    if (!runs.empty() && runs.back().end == chunk.begin)
      runs.back().end = chunk.end;
    else
      runs.push_back(chunk);
  }
  return runs;
}

int64_t ContextCut::count(int64_t rank) const {
  int64_t count = 0;
  for (const Interval& run : runs(rank)) count += run.size();
  return count;
}

std::vector<int64_t> ContextCut::positions(int64_t rank) const {
  std::vector<int64_t> positions;
  for (const Interval& run : runs(rank))
    for (int64_t position = run.begin; position < run.end; ++position) positions.push_back(position);
  return positions;
}

}  // namespace shardproof
