// Random numbers for the forward of a model. Each rank's thread has a stream, which is a counter: what it gives next depends on
// its seed and on how many sites have drawn from it, never on another rank. Recomputation replays it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace shardproof {

struct RandomStream {
  uint64_t seed = 0;
  uint64_t sites = 0;        // how many sites have drawn so far
  int64_t first_sample = 0;  // the index in the whole batch of the first sample (dim 0) that this rank computes
};

// The stream of the calling thread. Set it at the start of each microbatch from what identifies the microbatch: either the seed
// from the step and the microbatch's position in the global batch, or the seed from the step and first_sample from the
// position. In both cases masks do not depend on the mesh.
RandomStream& random_stream();

// The rows that a rank has of one dim of a whole tensor.
struct DimRows {
  std::vector<int64_t> rows;  // for each of the rank's rows, its index in the whole dim
  int64_t length = 0;         // the length of the whole dim
};
// All rows of a dim of length `rows`.
DimRows whole_rows(int64_t rows);

// One use of dropout in a forward. Every rank that passes through it has the same key.
struct DropoutSite {
  uint64_t key = 0;
  double probability = 0;
};
// Draws the next site from the calling thread's stream.
DropoutSite next_dropout_site(double probability);

// The mask for the part of a tensor that `dims` describes. An element is 0 with the site's probability, else 1 / (1 -
// probability). It is a function of the site and of the element's row-major index in the whole tensor, so every part of a
// tensor gets its part of the whole mask.
at::Tensor dropout_mask(const DropoutSite& site, const std::vector<DimRows>& dims, at::ScalarType dtype);

// Zeroes each element of x with this probability and multiplies the rest by 1 / (1 - probability). Returns x itself when not
// training. It uses the mask of the next site. The tensor must be whole in all dims but dim 0, which is the batch.
// Differentiable. The module `Dropout` (dropout.h) does the same for tensors that are cut in other dims.
at::Tensor dropout(const at::Tensor& x, double probability, bool training);

}  // namespace shardproof
