// Which keys a query of a Llama sees; golden.h has the rule.
#pragma once

#include <cstdint>

#include "golden/golden.h"

namespace golden {

inline bool sees_all_before(const Llama& llama, int64_t layer, int64_t length) {
  const bool reaches = llama.window == 0 || llama.window >= length || layer < llama.full_layers;
  return reaches && llama.document_end < 0;
}

// Whether the query at position i of a sequence of `tokens` sees the key at position j.
inline bool sees(const Llama& llama, int64_t layer, const int64_t* tokens, int64_t i, int64_t j) {
  if (j > i) return false;
  if (llama.window > 0 && layer >= llama.full_layers && j <= i - llama.window) return false;
  for (int64_t between = j; between < i; ++between)
    if (llama.document_end >= 0 && tokens[between] == llama.document_end) return false;
  return true;
}

}  // namespace golden
