// The forwards and backwards of a step, captured once and replayed in each later step: the host then gives the device one call
// instead of one for each kernel and collective. As in Megatron-LM's graph of a full iteration, the optimizer stays outside,
// and so do clipping and learning rates, which are numbers that change. LossScaler scales within the body, and is refused.
//
//   StepGraph graph(sharded, [&](const std::vector<at::Tensor>& inputs) {
//     const at::Tensor loss = loss_of(call(model, inputs[0]), inputs[1]);
//     loss.backward();
//     return std::vector<at::Tensor>{loss};
//   });
//   for (...) {
//     const at::Tensor loss = graph.run({tokens, targets})[0];
//     sharded.clip_gradients(1.0);
//     optimizer.step();
//   }
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "shardproof/sharding/fully_shard.h"

namespace shardproof {

struct StepGraphOptions {
  // So many steps run without a graph first: backends make their communicators and buffers then, and libraries choose kernels.
  int64_t warm_up_steps = 3;
};

// What keeps a step of this model from being captured, one line each, by the name of the option, module or backend; empty where
// nothing does that is known before the capture. It does not communicate.
std::vector<std::string> obstacles_to_step_graph(Sharded& sharded);

class StepGraph {
 public:
  // All forwards and backwards of one step, every microbatch of it, on the given tensors. It may return tensors that the caller
  // wants to read, such as the loss. It must do the same each time: a replay does not run it.
  using Body = std::function<std::vector<at::Tensor>(const std::vector<at::Tensor>& inputs)>;

  // Throws Error, which lists them, where there are obstacles. The Sharded must outlive this object, and this object must be
  // gone before the world's body ends. It does not communicate.
  StepGraph(Sharded& sharded, Body body, StepGraphOptions options = {});
  ~StepGraph();
  StepGraph(const StepGraph&) = delete;

  // Runs or replays the body on these inputs. Afterwards the gradients are final; the optimizer's step or Sharded::skip_step
  // comes next. Inputs may lie on the host. Returns what the body returned, without its graph of autograd. From the capture on
  // these are the same tensors each time, and the next run writes to them.
  //
  // Law: parameters and outputs have the bits that they have when the body is run each time.
  //
  // Throws Error, which says what, when inputs have other sizes or dtypes than at first, when gradients are there already, when
  // the body does what a graph cannot repeat, and after the capture when something that the graph relies on has changed: where
  // parameters or buffers of the model lie, which parameters train, whether modules are in training, or whether gradients are
  // synchronized. Inputs must not require gradients. An error of the capture comes on every rank, leaves no gradients and
  // changes no parameter; later runs begin with the warm-up. Other errors come on the rank that sees them, and the others then
  // wait in the replay, so give all ranks inputs of one size. Collective over the mesh.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs);
  bool is_captured() const;
  // Forgets the graph: later runs begin with the warm-up. For what changed on purpose, as by freezing parameters. Every rank.
  void forget();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace shardproof
