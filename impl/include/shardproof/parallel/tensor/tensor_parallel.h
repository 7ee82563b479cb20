// Tensor and sequence parallelism of a plain module. A plan maps patterns of module names to styles.
//
//   Gpt model(options);
//   TensorParallel parallel = parallelize(model.ptr(), comms, gpt_plan(options));
//   Sharded sharded = fully_shard(model.ptr(), comms, {...});      // knows what parallelize did
//
// Every rank along `axis` keeps its cut of the parameters. The module computes on what the rank has, and the styles put
// collectives around it. A module that is written with `call` needs no change under two conditions: its forward takes sizes
// from its parameters and inputs (heads = width / head size) and not from the options of the whole model, and each module with
// a style takes one tensor and returns one. The semantics and names are those of Megatron-LM's layers.
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

// Holds the styles of a module. The module computes on its cut only as long as this object lives, or a Sharded that was made of
// the module meanwhile.
class [[nodiscard]] TensorParallel {
 public:
  explicit TensorParallel(std::shared_ptr<ParallelState> state) : state_(std::move(state)) {}
  TensorParallel(TensorParallel&&) noexcept;
  TensorParallel& operator=(TensorParallel&&) noexcept;
  ~TensorParallel();

  // The parameters that are cut, and those for which each rank holds a term of the gradient.
  const std::vector<ParallelParameter>& parameters() const;
  // Returns every parameter whole, with its first name, on every rank. Throws Error when the module is sharded. Collective
  // along the axis.
  std::vector<std::pair<std::string, at::Tensor>> gather_parameters() const;

 private:
  std::shared_ptr<ParallelState> state_;
};

// Makes the module tensor parallel. Each parameter stays the same tensor object. It gets the values that rank 0 of the axis
// has, or this rank's cut of them; a parameter on the meta device stays there. Shard the module afterwards, not before. Throws
// Error, which names the module or the parameter, when the mesh lacks the axis, a pattern matches no module, a style does not
// fit its module, a size does not fit the axis, or the module is parallel or sharded already. With a sequence_dim it also
// throws when a module has parameters and no style, because their gradients would be wrong. Collective along the axis.
TensorParallel parallelize(std::shared_ptr<torch::nn::Module> module, std::shared_ptr<MeshComm> comms, ParallelPlan plan);

}  // namespace shardproof
