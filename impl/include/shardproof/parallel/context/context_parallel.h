// Context parallelism: every rank along an axis has some positions of each sequence, in all of the model.
//
//   Mesh mesh({{"dp_shard", 2}, {"cp", 2}});
//   Gpt model(options);
//   ContextParallel context = context_parallel(model.ptr(), comms);
//   Sharded sharded = fully_shard(model.ptr(), comms, {..., .divide_by_tokens = true});    // over dp_shard x cp
//   sharded.add_tokens(...);                                                             // those of this rank
//   loss = sum over own tokens of cross entropy(call(model, context.cut(tokens)), context.cut(targets))
//
// Works with modules whose positions and attention are those of attention.h, unchanged; all else must treat positions alike.
// Together with `parallelize`, in either order, and before `fully_shard`, which sums gradients over the axis as it does over
// dp_shard. Ranks along the axis are given the same whole batch, of which each cuts its own.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <string>

#include "shardproof/comm/mesh_comm.h"
#include "shardproof/parallel/context/context_attention.h"

namespace shardproof {

enum class ContextAttention { ring, gathered };

struct ContextOptions {
  ContextAttention attention = ContextAttention::ring;
  ContextSplit split = ContextSplit::balanced;
  std::string axis = "cp";
};

class ContextState;

// The module attends across ranks only as long as this lives, or a Sharded that was made of the module meanwhile.
class [[nodiscard]] ContextParallel {
 public:
  explicit ContextParallel(std::shared_ptr<ContextState> state) : state_(std::move(state)) {}
  ContextParallel(ContextParallel&&) noexcept;
  ContextParallel& operator=(ContextParallel&&) noexcept;
  ~ContextParallel();

  // This rank's positions, ascending, of what is whole along dim: tokens, targets. The length is that of forwards from now
  // on, and of what backwards compute again.
  at::Tensor cut(const at::Tensor& whole, int64_t dim = 1);
  // The inverse, e.g. of logits; differentiable as context_gather is. Collective along the axis.
  at::Tensor join(const at::Tensor& own, int64_t dim = 1) const;
  // How the last length is dealt out.
  DimCut layout() const;

 private:
  std::shared_ptr<ContextState> state_;
};

// Throws Error, naming module or mesh, when the mesh lacks the axis, there is no `Attention` or `Positions` below the module,
// or one is context parallel or sharded already.
ContextParallel context_parallel(std::shared_ptr<torch::nn::Module> module, std::shared_ptr<MeshComm> comms,
                                 ContextOptions options = {});

}  // namespace shardproof
