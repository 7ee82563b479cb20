// How context parallelism deals out the positions of a sequence. Pure integers.
#pragma once

#include <cstdint>
#include <vector>

#include "shardproof/algebra/layout.h"

namespace shardproof {

enum class ContextSplit {
  contiguous,  // one run a rank, cut as torch.chunk cuts
  balanced     // of 2n chunks, cut likewise, rank r has the chunks r and 2n-1-r: under a causal mask all have equal work
};

struct ContextCut {
  ContextSplit split = ContextSplit::balanced;
  int64_t length = 0;  // of the whole sequence
  int64_t ranks = 1;

  // The positions of a rank, ascending and never empty runs; no run for a rank that has none.
  // Law: the runs of all ranks tile [0, length).
  std::vector<Interval> runs(int64_t rank) const;
  int64_t count(int64_t rank) const;
  // The same one by one. Law: positions(rank).size() == count(rank).
  std::vector<int64_t> positions(int64_t rank) const;

  bool operator==(const ContextCut&) const = default;
};

}  // namespace shardproof
