// Causal attention of the language models.
#pragma once

#include <ATen/core/Tensor.h>

#include "golden/dropout.h"

namespace golden {

// q, k and v [B, heads, T, head] -> the same. Without dropout LibTorch's fused operation, with it step by step. `hidden` is
// bool [B, 1, T, T], which keys each query does not see; undefined: the later ones.
at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, Dropout& dropout,
                            const at::Tensor& hidden = {});

}  // namespace golden
