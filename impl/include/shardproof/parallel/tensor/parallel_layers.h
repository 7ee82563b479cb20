// The computations of tensor parallelism on weights that are cut already, for modules of your own; `parallelize` puts the same
// around plain ones. Every rank of the group must call them, and run the backward, in the same order; the graph keeps the
// group alive. In a group of one they are the plain operation, bit for bit. Semantics: Megatron-LM's layers.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>

#include "shardproof/comm/comm.h"

namespace shardproof {

// x [.., in], weight [own outputs, in], bias [own outputs] or undefined -> [.., own outputs]. x is replicated; or, given
// `sequence`, split along that dim of the whole length. The reduction of the input's gradient runs while the weight's gradient
// is computed.
struct SequenceSplit {
  int64_t dim = 0, length = 0;
};
at::Tensor column_parallel_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, Comm& group,
                                  std::optional<SequenceSplit> sequence = {});

// x [.., own inputs], weight [out, own inputs] -> [.., out], replicated, or split along `sequence_dim`. The bias [out] is added
// once, after the sum; to skip it pass an undefined one and add it where it suits.
at::Tensor row_parallel_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, Comm& group,
                               std::optional<int64_t> sequence_dim = {});

// tokens [..] of the whole vocabulary, weight [own rows, hidden] -> [.., hidden], replicated, or split along `sequence_dim`.
// This rank has the rows from `first_row` on. The row `padding_index`, in the whole numbering, gets no gradient.
at::Tensor vocab_parallel_embedding(const at::Tensor& tokens, const at::Tensor& weight, int64_t first_row, Comm& group,
                                    std::optional<int64_t> sequence_dim = {}, int64_t padding_index = -1);

struct CrossEntropyOptions {
  bool mean = true;  // over the tokens that count; else the sum
  double label_smoothing = 0;
  int64_t ignore_index = -100;
  int64_t vocab = 0;  // entries from here on are padding, without probability. 0: none is
};

// Cross entropy of logits [.., own entries] whose last dim of `entries` in all is cut evenly over the group, and targets [..]
// in the whole numbering, as at::cross_entropy_loss would give on gathered logits; they never are. Smoothing spreads over the
// whole vocabulary without padding. The result and its gradient are the same on every rank. Throws Error for a target outside
// the vocabulary.
at::Tensor vocab_parallel_cross_entropy(const at::Tensor& logits, const at::Tensor& targets, int64_t entries, Comm& group,
                                        const CrossEntropyOptions& options = {});

}  // namespace shardproof
