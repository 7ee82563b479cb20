// Which sizes can be cut over the mesh axes "tp" and "cp". Knows nothing of modules.
#pragma once

#include <cstdint>

#include "harness/case/case.h"
#include "shardproof/algebra/context_cut.h"

namespace harness {

// Whether every one of `parts` gets some of `length` rows, cut as evenly as torch.chunk cuts; both at least 1.
bool all_get_some(int64_t length, int64_t parts);

// Whether the heads can be dealt out over `ranks` so that each has the key heads of its queries.
bool heads_fit(const golden::Llama& llama, int64_t ranks);

shardproof::ContextSplit context_split(const Case& c);

// Whether a sequence of this length gives every rank along cp, and with sequence parallelism along tp, a token.
bool sequence_fits(const Case& c, int64_t length);

}  // namespace harness
