// What each style does around a module's forward, and to its parameters.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>

#include "parallel/tensor/parallel_state.h"
#include "shardproof/parallel/tensor/parallel_plan.h"

namespace shardproof {

// The hooks of one module, named `name` for messages. Cuts its parameters, where the style cuts any, and describes them to the
// state. Throws Error when the style does not fit the module.
std::shared_ptr<StyleHooks> make_style(const std::shared_ptr<ParallelState>& state, const std::string& name,
                                       torch::nn::Module& module, const ParallelStyle& style);

}  // namespace shardproof
