// Random numbers of a model's forward. A stream belongs to the thread of a rank and is a counter: what it gives next depends on
// its seed and on how many sites drew from it, never on another rank. Recomputation replays it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

namespace shardproof {

struct RandomStream {
  uint64_t seed = 0;
  uint64_t sites = 0;        // that have drawn
  int64_t first_sample = 0;  // of the batch (dim 0) that this rank computes, in the whole batch
};

// Of the calling thread. Set it at the start of a microbatch, from what identifies that: the seed from its position in the
// global batch and the step; or the seed from the step, and first_sample from the position. Either way a mask does not depend
// on the mesh.
RandomStream& random_stream();

// What a rank has of one dim of a whole tensor.
struct DimRows {
  std::vector<int64_t> rows;  // indices in the whole, one an own row
  int64_t length = 0;         // of the whole
};
// `rows` rows, as if they were all.
DimRows whole_rows(int64_t rows);

// One use of dropout, the same on every rank that comes by there.
struct DropoutSite {
  uint64_t key = 0;
  double probability = 0;
};
DropoutSite next_dropout_site(double probability);

// 0 with the site's probability, else 1 / (1 - probability): a function of the site and of the element's index in the whole
// tensor, row-major. So every cut has its part of the mask of the whole.
at::Tensor dropout_mask(const DropoutSite& site, const std::vector<DimRows>& dims, at::ScalarType dtype);

// x with each element zeroed with this probability and the rest multiplied by 1 / (1 - probability); x itself when not
// training. The mask is that of the next site, for a tensor that is whole but for its first dim, which is the batch.
// Differentiable. `Dropout` (dropout.h) is the same for tensors that are cut.
at::Tensor dropout(const at::Tensor& x, double probability, bool training);

}  // namespace shardproof
