// The splits by which context parallelism cuts a sequence. This header is arithmetic on integers only.
#pragma once

#include <cstdint>

#include "shardproof/algebra/axes.h"
#include "shardproof/algebra/split.h"

namespace shardproof {

enum class ContextSplit {
  contiguous,  // each rank has one run, as torch.chunk cuts
  balanced     // of 2n chunks, rank r has the chunks r and 2n-1-r, so under a causal mask all ranks have equal work; as in
               // Megatron-LM, and as the "zigzag" cut of ring-flash-attention
};

// The cut of a sequence of `length` positions over `ranks` ranks.
inline DimCut context_cut(ContextSplit split, int64_t length, int64_t ranks) {
  return {split == ContextSplit::balanced ? balanced_split(axes::cp) : Split{axes::cp}, length, ranks};
}

}  // namespace shardproof
