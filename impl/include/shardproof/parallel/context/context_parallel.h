// Context parallelism, as in Megatron-LM: every rank along an axis has some positions of each sequence, throughout the model.
//
//   Mesh mesh({{"dp_shard", 2}, {"cp", 2}});
//   Gpt model(options);
//   ContextParallel context = context_parallel(model.ptr(), comms);
//   Sharded sharded = fully_shard(model.ptr(), comms, {..., .divide_by_tokens = true});    // over dp_shard x cp
//   sharded.add_tokens(...);                                                               // this rank's tokens
//   loss = sum over own tokens of cross entropy(call(model, context.cut(tokens)), context.cut(targets))
//
// It works with unchanged modules that take positions and attention from attention.h. Everything else in the model must treat
// all positions alike. It may be combined with `parallelize`, in either order, and comes before `fully_shard`, which sums
// gradients over the axis as it does over dp_shard. Ranks along the axis get the same whole batch, from which each cuts its own
// positions.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <string>

#include "shardproof/algebra/axes.h"
#include "shardproof/comm/mesh_comm.h"
#include "shardproof/parallel/context/context_attention.h"

namespace shardproof {

enum class ContextAttention { ring, gathered, ulysses };

struct ContextOptions {
  ContextAttention attention = ContextAttention::ring;
  ContextSplit split = ContextSplit::balanced;
  std::string axis = axes::cp;
};

class ContextState;

// The module attends across ranks only as long as this object lives, or a Sharded that was made of the module meanwhile.
class [[nodiscard]] ContextParallel {
 public:
  explicit ContextParallel(std::shared_ptr<ContextState> state) : state_(std::move(state)) {}
  ContextParallel(ContextParallel&&) noexcept;
  ContextParallel& operator=(ContextParallel&&) noexcept;
  ~ContextParallel();

  // Returns this rank's positions, ascending, of a tensor that is whole along dim, such as tokens or targets. From now on the
  // calling thread's forwards, and what is recomputed of them, work on sequences of this tensor's length.
  at::Tensor cut(const at::Tensor& whole, int64_t dim = 1);
  // The inverse, e.g. for logits. It is differentiable, as context_gather is. Collective along the axis.
  at::Tensor join(const at::Tensor& own, int64_t dim = 1) const;
  // How the length of the calling thread's last `cut` is dealt out to the ranks.
  DimCut layout() const;

 private:
  std::shared_ptr<ContextState> state_;
};

// Makes the module context parallel. Throws Error, which names the module or the mesh, when the mesh lacks the axis, when there
// is no `Attention` and no `Positions` below the module, or when one of them is context parallel or sharded already. Collective
// along the axis.
ContextParallel context_parallel(std::shared_ptr<torch::nn::Module> module, std::shared_ptr<MeshComm> comms,
                                 ContextOptions options = {});

}  // namespace shardproof
