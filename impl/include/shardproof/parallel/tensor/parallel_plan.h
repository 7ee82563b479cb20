// The styles of tensor and sequence parallelism, and a plan that says which module gets which style. Most names are those of
// torch.distributed.tensor.parallel and of Megatron-LM's layers.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "shardproof/algebra/axes.h"
#include "shardproof/algebra/layout.h"

namespace shardproof {

// For a torch::nn::Linear: cuts the rows of its weight and bias, which are its outputs. Its input is replicated, or split along
// sequence_dim. Its output is split in the last dim, or replicated with `gather_output`. The reduction of the input's gradient
// overlaps with the computation of the weight's gradient (see also ParallelPlan::overlap_pieces). `segments` cuts rows that
// consist of several things, such as queries, keys and values; empty: the rows are cut evenly.
struct ColumnParallel {
  bool gather_output = false;
  std::vector<CutSegment> segments = {};
};
// For a torch::nn::Linear: cuts the columns of its weight, which are its inputs. Its input is split in the last dim; without
// `input_is_parallel` it is replicated, and is cut first. Its output is replicated, or split along sequence_dim. The bias is
// whole on every rank and is added once, after the sum.
struct RowParallel {
  bool input_is_parallel = true;
  std::vector<CutSegment> segments = {};  // cuts the columns as the outputs of the layer before are cut
};
// For a torch::nn::Embedding: cuts the rows of its weight. Its tokens are replicated. Its output is replicated, or split along
// sequence_dim.
struct VocabParallel {};
// For a module whose parameters are whole and whose input is split along sequence_dim, e.g. a norm. Each rank then holds a term
// of the gradient, and the terms are summed over the axis. A Dropout uses this rank's part of the whole mask. Without
// sequence_dim the style does nothing.
struct SequenceParallel {};
// For a module whose parameters are whole and that computes on a cut activation, with or without sequence_dim: e.g. a norm of
// the queries or keys of this rank's heads. Each rank holds a term of the gradient, and the terms are summed over the axis.
// DTensor calls such a gradient Partial. Megatron-LM sums these gradients by the names of the layers, in finalize_model_grads.
// Training finds a parameter that lacks this style (ParallelPlan::compare_replicas).
struct PartialGradients {};
// For a module that is not cut and whose input is whole. When the plan has a sequence_dim, its output is then split along
// `dim`. For position embeddings [T, hidden], dim is 0.
struct ScatterOutput {
  int64_t dim = 0;
};
// For a module that is not cut and needs whole sequences, such as a layer of experts. When the plan has a sequence_dim, its
// input is gathered along it, and its output is split again; every rank computes the same.
struct WholeSequence {};
// For a computation that is entered with call_as and uses what another module's style cuts, such as the weight of a tied head,
// or heads that share their keys. It treats the input as ColumnParallel does.
struct ColumnInput {};
// For a Dropout whose input comes from a ColumnParallel layer. The input's dim `dim` is cut in `segments` as the outputs of
// that layer are. For an Attention with dropout, `dim` is 1 and segments are counted in heads. The module uses this rank's part
// of the whole mask.
struct CutDropout {
  int64_t dim = -1;
  std::vector<CutSegment> segments;
};

// For an Attention whose heads come from ColumnParallel layers. Both lists are counted in heads. `heads` cuts the query heads;
// dropout then works as with CutDropout{1, heads}. `kv_heads` cuts the key heads, of which ranks may hold copies. With
// canonical arithmetic the gradients of copies are summed before anything rounds them; canonical arithmetic refuses copies
// without this style.
struct CutAttention {
  std::vector<CutSegment> heads, kv_heads;
};

// For Experts (experts.h), and modules of your own that use Dispatch and whose parameters have experts along their first dim:
// gives each of `ranks` neighbours some experts, cut as torch.chunk cuts. The other styles are about ranks that work on one
// batch; these ranks have a batch each, and lie where the mesh has its data-parallel ranks: `fully_shard` shards experts over
// the ranks that hold the same ones (expert_mesh in algebra/strategy.h). Ranks along the plan's axis hold the same experts, or
// slices of them. All experts of a module have the same `ranks`. A plan of this style alone needs no axis, but for
// `cut_inside`.
struct ExpertParallel {
  int64_t ranks = 1;
  // Each rank along the plan's axis holds a slice of every expert: of the rows of gate and of up, and of the columns of down,
  // cut as torch.chunk cuts. These ranks sum what their slices give, and the gradients of the rows that they take. For Experts,
  // and modules of your own with the parameters that these have; they give slice_group to their Dispatch.
  bool cut_inside = false;
};

using ParallelStyle = std::variant<ColumnParallel, RowParallel, VocabParallel, SequenceParallel, PartialGradients,
                                   ScatterOutput, WholeSequence, ColumnInput, CutDropout, CutAttention, ExpertParallel>;

struct ParallelPlan {
  // Patterns of module names (base/name_pattern.h) and their styles. The first pattern that matches a module counts. A pattern
  // that matches no module is an error.
  std::vector<std::pair<std::string, ParallelStyle>> styles;
  std::string axis = axes::tp;
  // When it is set, activations between parallel blocks are split along this dim (sequence parallelism). A length that the axis
  // does not divide is cut as torch.chunk cuts it, and must be large enough that every rank has a row.
  std::optional<int64_t> sequence_dim = {};
  // Whether training compares the gradients of parameters that are whole on every rank along the axis. If such gradients differ
  // between ranks, the copies of the parameter would drift apart silently. So after the last backward of steps 1, 2, 4, 8 and
  // so on, every rank throws an Error that names such a parameter. A comparison sends two numbers for each parameter.
  bool compare_replicas = true;
  // Into how many pieces of the batch ColumnParallel and RowParallel layers cut their products, so that the collective of one
  // piece runs while another is multiplied: the gather of the input and the sum of its gradient, or the sum of the output and
  // the gather of its gradient. 1: products stay whole. The batch is the first dim that is neither the sequence nor the last.
  // It is cut as torch.chunk cuts it, into fewer pieces where it is shorter. The gradients of weights are not cut. In canonical
  // arithmetic no number of pieces changes a bit. Otherwise a product of fewer rows may be rounded differently, as with another
  // number of ranks.
  int64_t overlap_pieces = 1;
};

// A parameter that was cut, or for which each rank holds a term of the gradient.
struct ParallelParameter {
  std::string name;  // its first
  Shape shape;       // of the whole
  Layout layout = {};  // along the axis, of experts along ep; replicated when it was not cut
  int64_t grad_partial_ranks = 1;  // how many neighbours along the axis each hold a term of its gradient; 1: it is whole
};

}  // namespace shardproof
