// How context parallelism cuts a sequence: the splits it offers. Pure integers.
#pragma once

#include <cstdint>

#include "shardproof/algebra/split.h"

namespace shardproof {

enum class ContextSplit {
  contiguous,  // one run a rank, cut as torch.chunk cuts
  balanced     // of 2n chunks, rank r has the chunks r and 2n-1-r: under a causal mask all ranks have equal work
};

// The cut of a sequence of `length` positions over `ranks`.
inline DimCut context_cut(ContextSplit split, int64_t length, int64_t ranks) {
  return {split == ContextSplit::balanced ? balanced_split("cp") : Split{"cp"}, length, ranks};
}

}  // namespace shardproof
