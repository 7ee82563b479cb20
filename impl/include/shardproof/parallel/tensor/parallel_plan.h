// The styles of tensor and sequence parallelism, and a plan: which module gets which.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "shardproof/algebra/layout.h"

namespace shardproof {

// Cuts the rows of a torch::nn::Linear, weight and bias, by its outputs: replicated in (or, with sequence_dim, split along it),
// split in the last dim out. The reduction of the input's gradient overlaps with the weight's gradient. With `gather_output`
// replicated out. `segments`: of the rows, when they are more than one thing; empty: all rows alike.
struct ColumnParallel {
  bool gather_output = false;
  std::vector<CutSegment> segments = {};
};
// Cuts a torch::nn::Linear by its inputs: split in the last dim in, replicated (or split along sequence_dim) out. The bias is
// whole on every rank and added once, after the sum. Without `input_is_parallel` a replicated input is cut first.
struct RowParallel {
  bool input_is_parallel = true;
  std::vector<CutSegment> segments = {};  // of the columns; as the outputs of the layer before are cut
};
// Cuts the rows of a torch::nn::Embedding. Tokens replicated in, replicated (or split along sequence_dim) out.
struct VocabParallel {};
// A module without a cut whose input is split along sequence_dim, e.g. a norm: its parameters are whole, their gradients terms
// of a sum over the axis. Of a Dropout the mask is this rank's part of that of the whole. Nothing without sequence_dim.
struct SequenceParallel {};
// A module without a cut that computes on what a cut gave it, whatever the sequence: a norm of the queries or keys of this
// rank's heads. Its parameters are whole, their gradients terms of a sum over the axis (DTensor calls such a gradient Partial),
// with and without sequence_dim. Megatron-LM sums these gradients by the names of the layers, in finalize_model_grads. Training
// finds a parameter that should have the style and does not, see ParallelPlan::compare_replicas.
struct PartialGradients {};
// A module without a cut that runs on what is whole; its output is then split along `dim`, when the plan has a sequence_dim.
// For position embeddings [T, hidden], dim is 0.
struct ScatterOutput {
  int64_t dim = 0;
};
// What a column-parallel layer does to its input, for a computation that is entered with call_as and uses a weight that is cut
// elsewhere: a tied head.
struct ColumnInput {};
// For a Dropout on what a ColumnParallel gives, whose dim `dim` is cut in `segments` as its outputs are; for an Attention with
// dropout, dim 1 and segments counted in heads. The mask is this rank's part of that of the whole.
struct CutDropout {
  int64_t dim = -1;
  std::vector<CutSegment> segments;
};

// For an Attention whose heads are the outputs of ColumnParallel layers, both counted in heads. `heads` are the queries' ones:
// dropout as CutDropout{1, heads}. `kv_heads` are the key heads that ranks may hold in copies: with canonical arithmetic their
// gradients are summed over the copies before anything rounds them, and without this style copies are refused there.
struct CutAttention {
  std::vector<CutSegment> heads, kv_heads;
};

using ParallelStyle = std::variant<ColumnParallel, RowParallel, VocabParallel, SequenceParallel, PartialGradients,
                                   ScatterOutput, ColumnInput, CutDropout, CutAttention>;

struct ParallelPlan {
  // Pattern of module names (base/name_pattern.h) -> style; the first that fits counts. A pattern that fits no module is an
  // error.
  std::vector<std::pair<std::string, ParallelStyle>> styles;
  std::string axis = "tp";
  // Between parallel blocks activations are split along this dim (sequence parallelism). Lengths that the axis does not divide
  // are cut as torch.chunk cuts, and must be at least such that no rank is left without a row.
  std::optional<int64_t> sequence_dim = {};
  // Whether training compares the gradients of parameters that are whole on every rank along the axis, after the backward of
  // steps 1, 2, 4, 8 and so on of a Sharded. Such a parameter trains apart when its gradients differ, silently otherwise: then
  // every rank throws Error, which names it. Two numbers a parameter cross the ranks.
  bool compare_replicas = true;
};

// A parameter that was cut, or whose gradient is a term of a sum over the axis.
struct ParallelParameter {
  std::string name;  // its first
  Shape shape;       // of the whole
  Layout layout = {};  // along the axis; replicated when it was not cut
  int64_t terms = 1;  // so many neighbours along the axis hold terms of its gradient
};

}  // namespace shardproof
