#include "harness/case/parallel_sizes.h"

namespace harness {

bool all_get_some(int64_t length, int64_t parts) {
  const int64_t chunk = (length - 1) / parts + 1;
  return (length - 1) / chunk + 1 >= parts;
}

bool heads_fit(const golden::Llama& llama, int64_t ranks) {
  if (llama.kv_heads >= ranks) return all_get_some(llama.kv_heads, ranks);
  return ranks % llama.kv_heads == 0 && llama.heads % ranks == 0;
}

shardproof::ContextSplit context_split(const Case& c) {
  return c.options.context_contiguous ? shardproof::ContextSplit::contiguous : shardproof::ContextSplit::balanced;
}

bool sequence_fits(const Case& c, int64_t length) {
  const int64_t cp = c.context_ranks(), tp = c.options.sequence_parallel ? c.tensor_ranks() : 1;
  const shardproof::DimCut cut = shardproof::context_cut(context_split(c), length, cp);
  for (int64_t rank = 0; rank < cp; ++rank)
    if (cut.count(rank) == 0 || !all_get_some(cut.count(rank), tp)) return false;
  return true;
}

}  // namespace harness
