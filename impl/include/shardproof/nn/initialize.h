// Initial values of parameters. They depend on a seed, a name and an index, never on the state of a random generator, so every
// rank can compute its own part.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <string>

#include "shardproof/algebra/layout.h"

namespace shardproof {

// Fills `values` with the row-major elements [run.begin, run.end) of the parameter `name`, whose whole shape is `shape`. The
// result must depend on the arguments alone.
using Initializer = std::function<void(const std::string& name, const Shape& shape, Interval run, at::Tensor values)>;

// Element i of a parameter is a function of (seed, name, i) alone; a tied parameter uses its first name. Parameters of two or
// more dims are normally distributed with this standard deviation and mean 0. Of the others, those whose name ends in "weight"
// are ones, and the rest are zeros.
Initializer normal_initializer(uint64_t seed, double standard_deviation = 0.02);

// Element i of any parameter is uniformly distributed in [-bound, bound), a function of (seed, name, i) alone.
Initializer uniform_initializer(uint64_t seed, double bound);

// Fills every parameter of a module whose parameters have memory.
void initialize_parameters(torch::nn::Module& module, const Initializer& initialize);
inline void initialize_parameters(torch::nn::Module& module, uint64_t seed, double standard_deviation = 0.02) {
  initialize_parameters(module, normal_initializer(seed, standard_deviation));
}

}  // namespace shardproof
