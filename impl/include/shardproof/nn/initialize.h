// Initial values from counters, never from a generator's state.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <string>

#include "shardproof/algebra/layout.h"

namespace shardproof {

// Fills the row-major elements [run.begin, run.end) of a parameter; called for parameters without memory. Must be a function of
// its arguments alone.
using Initializer = std::function<void(const std::string& name, const Shape& shape, Interval run, at::Tensor values)>;

// Element i of the parameter called `name` is a function of (seed, name, i) alone, where a tied parameter goes by its first
// name. Parameters of two and more dims get a normal distribution with the given standard deviation, other ones whose name ends
// in "weight" ones, the rest zeros.
Initializer normal_initializer(uint64_t seed, double standard_deviation = 0.02);

// Fills every parameter of a module that has memory.
void initialize_parameters(torch::nn::Module& module, const Initializer& initialize);
inline void initialize_parameters(torch::nn::Module& module, uint64_t seed, double standard_deviation = 0.02) {
  initialize_parameters(module, normal_initializer(seed, standard_deviation));
}

}  // namespace shardproof
