// How to shard a module: the strategy, which modules are units, how their bytes are laid out, how sums are taken.
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <functional>
#include <string>

#include "shardproof/strategy.h"

namespace shardproof {

// Chooses the units among the descendants of the root. The root is always one; it holds what no other unit does.
using UnitSelector = std::function<bool(const std::string& name, const torch::nn::Module& module)>;

// Every module of these types, e.g. by_type<GptBlockImpl>().
template <class... Modules>
UnitSelector by_type() {
  return [](const std::string&, const torch::nn::Module& module) {
    return (... || (dynamic_cast<const Modules*>(&module) != nullptr));
  };
}

// `ordered`: the gradient norm is the exact sum of squares, rounded once, so it does not depend on where shards are cut.
// `fast`: plain double sums.
enum class Numerics { ordered, fast };

struct ShardOptions {
  Strategy strategy = shardproof::strategy("zero3");
  UnitSelector units = {};  // empty: the root is the only unit
  // A unit's parameters go into one bucket, or into several of at most this many bytes each. 0: one.
  int64_t bucket_bytes_max = 0;
  // Every parameter starts at a multiple of this in its bucket; a power of two and at least 64, because vector kernels
  // round differently at other offsets.
  int64_t alignment_bytes = 512;
  // Free gathered parameters between a unit's forward and backward. The root keeps its own.
  bool reshard_after_forward = true;
  Numerics numerics = Numerics::ordered;
  // The reduced gradient is divided by this, once. 0: by the number of ranks it was summed over, which averages losses
  // that are means over each rank's samples.
  double gradient_divide = 0;
  // Start from rank 0's parameters and buffers everywhere.
  bool broadcast_initial_values = true;
};

}  // namespace shardproof
