// What dropout and attention need to know of a cut: which rows and heads of the whole a rank has.
#pragma once

#include <torch/nn/module.h>

#include <memory>
#include <string>

#include "parallel/tensor/parallel_state.h"
#include "shardproof/parallel/tensor/parallel_plan.h"

namespace shardproof {

// Tells every Dropout of the module that it sees this rank's piece of the sequence.
void place_along_sequence(const std::shared_ptr<ParallelState>& state, torch::nn::Module& module);

// The hooks of these styles, as make_style (styles.h) makes those of others.
std::shared_ptr<StyleHooks> cut_dropout(const std::shared_ptr<ParallelState>& state, const std::string& name,
                                        torch::nn::Module& module, const CutDropout& style);
std::shared_ptr<StyleHooks> cut_attention(const std::shared_ptr<ParallelState>& state, const std::string& name,
                                          torch::nn::Module& module, const CutAttention& style);

}  // namespace shardproof
