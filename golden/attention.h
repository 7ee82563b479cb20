// Causal attention of the language models.
#pragma once

#include <ATen/core/Tensor.h>

#include "golden/dropout.h"

namespace golden {

// q, k and v [B, heads, T, head] -> the same. Without dropout LibTorch's fused operation, with it step by step.
at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, Dropout& dropout);

}  // namespace golden
