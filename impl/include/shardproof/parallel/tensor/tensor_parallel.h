// Tensor and sequence parallelism of a plain module: name patterns to styles.
//
//   Gpt model(options);
//   TensorParallel parallel = parallelize(model.ptr(), comms, gpt_plan(options));
//   Sharded sharded = fully_shard(model.ptr(), comms, {...});      // knows what parallelize did
//
// Every rank along `axis` keeps a cut of the parameters; the module computes on what it has, and the styles put collectives
// around. A module written with `call` needs no change as long as its forward takes sizes from its parameters and inputs (heads
// = width / head size), not from the options of the whole, and the modules with a style take one tensor and return one. Where
// the semantics come from: Megatron-LM's layers, whose names these are.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "shardproof/comm/mesh_comm.h"
#include "shardproof/parallel/tensor/parallel_plan.h"

namespace shardproof {

class ParallelState;

// Keeps the styles at the module's parts; the module computes on its cut only as long as this lives, or a Sharded that was made
// of the module meanwhile.
class [[nodiscard]] TensorParallel {
 public:
  explicit TensorParallel(std::shared_ptr<ParallelState> state) : state_(std::move(state)) {}
  TensorParallel(TensorParallel&&) noexcept;
  TensorParallel& operator=(TensorParallel&&) noexcept;
  ~TensorParallel();

  // Of parameters that are cut, or have terms.
  const std::vector<ParallelParameter>& parameters() const;
  // Every parameter whole, by its first name, on every rank. Collective along the axis; not of a module that is sharded.
  std::vector<std::pair<std::string, at::Tensor>> gather_parameters() const;

 private:
  std::shared_ptr<ParallelState> state_;
};

// Collective along the axis. Parameters keep their identity and get rank 0's values along the axis, or the rank's cut of them;
// those on the meta device stay there. Shard the module afterwards, not before. Throws Error, naming module or parameter, when
// the mesh lacks the axis, a pattern fits no module, a style does not fit its module, a size does not fit the axis, the module
// is parallel or sharded already, or, with a sequence_dim, when a module has parameters and no style, whose gradients would be
// wrong.
TensorParallel parallelize(std::shared_ptr<torch::nn::Module> module, std::shared_ptr<MeshComm> comms, ParallelPlan plan);

}  // namespace shardproof
