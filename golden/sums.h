// Sums of microbatches' gradients in the order, and with the roundings, that a run prescribes.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

#include "golden/golden.h"

namespace golden {

using Tensors = std::vector<at::Tensor>;

// Adds the gradients of every (round, rank) of a step. `gradients` is called once for each of them, in any order. The result is in
// float32, or in float64 when `dtype` is.
Tensors summed_gradients(const Step& step, const SumOrder& order, const Precision& precision, at::ScalarType dtype,
                         const std::function<Tensors(size_t round, size_t rank)>& gradients);

}  // namespace golden
