// The computations of tensor parallelism on weights that are cut already, for modules of your own; `parallelize` puts the same
// computations around plain modules. Every rank of the group must call them, and run their backward, in the same order. The
// graph keeps the group alive. In a group of one rank they have the bits of the plain operation. The semantics are those of
// Megatron-LM's layers.py in core/tensor_parallel (Shoeybi et al. 2019; for sequence parallelism Korthikanti et al. 2022).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "shardproof/comm/comm.h"

namespace shardproof {

// x [.., in], weight [own outputs, in], bias [own outputs] or undefined -> [.., own outputs]. x is replicated; with `sequence`
// it is split along `sequence.dim`, whose whole length is `sequence.length`. The reduction of the input's gradient runs while
// the weight's gradient is computed. `overlap_pieces` is that of a ParallelPlan (parallel_plan.h).
struct SequenceSplit {
  int64_t dim = 0, length = 0;
};
at::Tensor column_parallel_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, Comm& group,
                                  std::optional<SequenceSplit> sequence = {}, int64_t overlap_pieces = 1);

// x [.., own inputs], weight [out, own inputs] -> [.., out], which is replicated, or split along `sequence_dim` where that is
// given. The bias [out] is added once, after the sum. To add it elsewhere, pass an undefined bias.
at::Tensor row_parallel_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, Comm& group,
                               std::optional<int64_t> sequence_dim = {}, int64_t overlap_pieces = 1);

// tokens [..] of the whole vocabulary, weight [own rows, hidden] -> [.., hidden], which is replicated, or split along
// `sequence_dim` where that is given. This rank has the rows of the vocabulary from `first_row` on. The row `padding_index` of
// the whole vocabulary gets no gradient.
at::Tensor vocab_parallel_embedding(const at::Tensor& tokens, const at::Tensor& weight, int64_t first_row, Comm& group,
                                    std::optional<int64_t> sequence_dim = {}, int64_t padding_index = -1);

}  // namespace shardproof
