// Causal attention in canonical arithmetic, of one sequence, by plain loops.
#pragma once

#include <cstdint>
#include <vector>

#include "golden/canonical_math.h"

namespace golden::exact {

// q [T, heads * width], k and v [T, kv_heads * width]; a key head serves heads / kv_heads neighbouring query heads.
struct Attention {
  Matrix q, k, v;
  int64_t heads = 1, kv_heads = 1;
  std::vector<double> mask = {};  // of dropout, [heads, T, T]; empty: none
  std::vector<char> hidden = {};  // [T, T], where query i does not see key j <= i; empty: nowhere
};

// [T, heads * width]
Matrix attention(const Attention& a);
struct AttentionGradients {
  Matrix q, k, v;
};
AttentionGradients attention_backward(const Attention& a, const Matrix& dy);

}  // namespace golden::exact
