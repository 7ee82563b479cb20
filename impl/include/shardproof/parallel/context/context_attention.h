// Attention over a sequence that is cut over a group of ranks, for models of your own; `context_parallel` puts it into models
// that use `Attention`. A rank passes q [B, heads, T, head], k and v [B, kv_heads, T, head] at its own positions of the cut,
// and gets the output at these positions, as if it were computed on the whole sequence. Every rank of the group must call, and
// run the backward, in the same order, even when it has no positions. The graph keeps the group alive. Any length, number of
// heads and number of ranks will do. Documents of the sight are those of the whole sequence, on every rank. Throws Error, which
// names the rank, when sizes do not fit the cut. None has a second derivative.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "shardproof/algebra/context_cut.h"
#include "shardproof/comm/comm.h"
#include "shardproof/nn/attention.h"

namespace shardproof {

// Gathers the keys and values of the whole sequence, and reduce-scatters their gradients, as Llama 3 does (Grattafiori et al.
// 2024, "The Llama 3 Herd of Models"). It needs memory for the scores of this rank's queries with all keys.
at::Tensor gathered_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const DimCut& cut,
                              const AttentionSight& sight, const std::optional<AttentionDropout>& dropout, Comm& group);

// Ring attention (Liu et al. 2023, "Ring Attention with Blockwise Transformers for Near-Infinite Context"). Keys and values
// travel around the ranks, in the backward together with their gradients, while each rank computes on those it has. So no rank
// ever holds more than two ranks' keys and values. Pairs that a causal mask hides are not computed. It accumulates in float32,
// or in float64 for float64 inputs.
at::Tensor ring_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const DimCut& cut,
                          const AttentionSight& sight, const std::optional<AttentionDropout>& dropout, Comm& group);

// Exchanges positions for heads, as DeepSpeed-Ulysses does (Jacobs et al. 2023, "DeepSpeed Ulysses: System Optimizations for
// Enabling Training of Extreme Long Sequence Transformer Models"). In between, a rank has whole sequences of some key heads and
// of the query heads that they serve; ranks beyond the number of key heads have none. Two exchanges, two more in the backward.
at::Tensor ulysses_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const DimCut& cut,
                             const AttentionSight& sight, const std::optional<AttentionDropout>& dropout, Comm& group);

// The three with canonical arithmetic. Sums over keys, and sums of gradients over queries, are exact, so all functions give the
// same bits. In the forward the ring goes round twice; the first round finds the largest score of every query. `name` appears
// in messages.
at::Tensor canonical_gathered_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const DimCut& cut,
                                        const AttentionSight& sight, const std::optional<AttentionDropout>& dropout,
                                        const std::string& name, Comm& group);
at::Tensor canonical_ring_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const DimCut& cut,
                                    const AttentionSight& sight, const std::optional<AttentionDropout>& dropout,
                                    const std::string& name, Comm& group);
at::Tensor canonical_ulysses_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const DimCut& cut,
                                       const AttentionSight& sight, const std::optional<AttentionDropout>& dropout,
                                       const std::string& name, Comm& group);

// Returns the rank's positions of x, ascending. x is whole along dim.
at::Tensor context_piece(const at::Tensor& x, int64_t dim, const DimCut& cut, int64_t rank);
// The inverse: joins what every rank has of dim. It is differentiable. Gradients of the whole are summed over the ranks, and
// each rank gets its own positions of the sum. Collective over the group.
at::Tensor context_gather(const at::Tensor& own, int64_t dim, const DimCut& cut, Comm& group);

}  // namespace shardproof
