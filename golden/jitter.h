#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace golden {

// `tensor` with half of its numbers one float off, away from zero or towards it. Zeros stay, and so does float64.
at::Tensor jittered(const at::Tensor& tensor, uint64_t seed);

}  // namespace golden
