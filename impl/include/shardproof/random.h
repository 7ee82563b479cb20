// Random numbers of a model's forward. A stream belongs to the thread of a rank and is a counter: what it gives next depends on
// its seed and on how many sites drew from it, never on another rank. Recomputation replays it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace shardproof {

struct RandomStream {
  uint64_t seed = 0;
  uint64_t sites = 0;  // that have drawn
};

// Of the calling thread. Set the seed at the start of a microbatch, from what identifies it: its position in the global batch
// and the step, so that a mask does not depend on the mesh.
RandomStream& random_stream();

// x with each element zeroed with this probability and the rest multiplied by 1 / (1 - probability); x itself when not
// training. Element i of the mask is a function of (seed, site, i). Differentiable.
at::Tensor dropout(const at::Tensor& x, double probability, bool training);

}  // namespace shardproof
