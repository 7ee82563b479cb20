// Attention over a sequence that is dealt out over a group of ranks, for models of your own; `context_parallel` puts it
// into models that use `Attention`. q [B, heads, T, head], k and v [B, kv_heads, T, head] at this rank's positions of the
// cut -> the output at the same positions, as if computed on the whole sequence. Every rank of the group must call, and run
// the backward, in the same order, a rank without positions as well; the graph keeps the group alive. Any length, head count
// and number of ranks. Throws Error, naming the rank, when the sizes do not fit the cut.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "shardproof/algebra/context_cut.h"
#include "shardproof/comm/comm.h"
#include "shardproof/nn/attention.h"

namespace shardproof {

// Keys and values of the whole sequence are gathered, and their gradients reduce-scattered. Memory for scores of own queries by
// all keys.
at::Tensor gathered_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const DimCut& cut, bool causal,
                              const std::optional<AttentionDropout>& dropout, Comm& group);

// Keys and values travel around the ranks, in the backward with their gradients, while each rank computes on what it has: no
// rank ever holds more than two ranks' keys and values. What a causal mask hides is not computed. Accumulates in float32 at
// least. No second derivative.
at::Tensor ring_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const DimCut& cut, bool causal,
                          const std::optional<AttentionDropout>& dropout, Comm& group);

// Both with canonical arithmetic: sums over keys, and those of gradients over queries, are exact, so both give the same bits.
// The ring goes round twice in the forward, the first time for the largest score of every query. `name` is for messages.
at::Tensor canonical_gathered_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const DimCut& cut,
                                        bool causal, const std::optional<AttentionDropout>& dropout, const std::string& name,
                                        Comm& group);
at::Tensor canonical_ring_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const DimCut& cut,
                                    bool causal, const std::optional<AttentionDropout>& dropout, const std::string& name,
                                    Comm& group);

// x whole along dim -> the rank's positions, ascending.
at::Tensor context_piece(const at::Tensor& x, int64_t dim, const DimCut& cut, int64_t rank);
// The inverse, from every rank's own. Differentiable: gradients of the whole are summed over the ranks, each of which gets
// its own positions of the sum. Collective.
at::Tensor context_gather(const at::Tensor& own, int64_t dim, const DimCut& cut, Comm& group);

}  // namespace shardproof
