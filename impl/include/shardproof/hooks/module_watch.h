// Sees what the modules of a model read and give, in the forward and in the backward. Two runs that should be equal, for
// instance one that is sharded and one that is not, can so be compared module by module, and the first module that differs is
// near the mistake.
//
//   ModuleWatch watch(*model);        // after add_lora, parallelize, context_parallel and fully_shard
//   watch.begin();
//   at::Tensor loss = call(model, tokens);
//   watch.begin_backward();
//   loss.backward();
//   for (const ModuleCall& seen : watch.calls()) ...
//
// Watching copies every tensor that it sees, and changes no bit of what is computed. Each rank watches its own model.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace shardproof {

// One forward of a module. Tensors are copies on the module's device, and as they were for this rank: under tensor or context
// parallelism some are parts.
struct ModuleCall {
  std::string module;                                          // its name below the root, e.g. "h.0.attn.c_attn"
  int64_t number = 0;                                          // how often this module was seen before in this forward
  std::vector<std::pair<std::string, at::Tensor>> parameters = {};  // those of its own, whole if its unit was gathered; by name
  at::Tensor input, output;         // within the module's unit, and outside of its style of tensor parallelism
  at::Tensor output_gradient = {};  // what the backward brought; undefined when nothing came
  std::string note = "";            // what the watcher's `note` said when the module had run
};

// Watches the modules below `root` that have parameters of their own and no adapter, when they are entered through `call`
// (unit.h) with one tensor for one tensor. Any other call of such a module passes unseen. A module that is watched already is
// an Error.
class ModuleWatch {
 public:
  explicit ModuleWatch(torch::nn::Module& root, std::function<std::string()> note = {});
  ~ModuleWatch();
  ModuleWatch(const ModuleWatch&) = delete;

  // A forward begins. What was seen before is forgotten.
  void begin();
  // From here on a forward is a recomputation, which adds no calls.
  void begin_backward();

  // In the order in which they ended. Those of an earlier `begin` are gone.
  const std::vector<ModuleCall>& calls() const;

  struct State;

 private:
  std::shared_ptr<State> state_;
};

}  // namespace shardproof
