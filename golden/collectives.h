// What each collective means, as a loop over every rank's tensors. Element r of every vector belongs to rank
// r. Tensors count as flat; inputs are not touched and outputs are new.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace golden {

using Ranks = std::vector<at::Tensor>;

enum class Combine { sum, max, min };

// Terms in rank order, ((t[0] + t[1]) + t[2]) + ..., in their dtype; the first is copied, so that -0.0
// survives alone. A NaN anywhere makes max and min NaN.
at::Tensor combine(const Ranks& terms, Combine op = Combine::sum);

// Every rank: input 0, input 1, ... one after the other. All inputs have the same numel.
Ranks all_gather(const Ranks& inputs);
// Rank r: the combination of everybody's r-th slice of numel / ranks elements.
Ranks reduce_scatter(const Ranks& inputs, Combine op = Combine::sum);
Ranks all_reduce(const Ranks& inputs, Combine op = Combine::sum);
// Slice r of rank s's input, sizes[s][r] elements, lands at rank r, sorted by s.
Ranks all_to_all(const Ranks& inputs, const std::vector<std::vector<int64_t>>& sizes);
Ranks broadcast(const Ranks& inputs, int64_t root);

}  // namespace golden
