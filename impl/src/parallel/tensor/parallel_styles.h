// What each style does around a module's forward, and to its parameters.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>

#include "shardproof/hooks/unit.h"
#include "shardproof/parallel/tensor/tensor_parallel.h"

namespace shardproof {

class ParallelState;

class StyleHooks : public ParallelHooks {
 public:
  explicit StyleHooks(std::weak_ptr<ParallelState> state) : state_(std::move(state)) {}
  std::shared_ptr<ParallelState> state() const { return state_.lock(); }

 private:
  std::weak_ptr<ParallelState> state_;  // which owns this
};

// The hooks of one module, named `name` for messages. Cuts its parameters, where the style cuts any, and describes them to the
// state. Throws Error when the style does not fit the module.
std::shared_ptr<StyleHooks> make_style(const std::shared_ptr<ParallelState>& state, const std::string& name,
                                       torch::nn::Module& module, const ParallelStyle& style);

}  // namespace shardproof
