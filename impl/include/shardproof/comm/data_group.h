// The batch of ranks that share one: those along tp, and those along cp before each cuts its positions. Nothing fails when it
// differs; the model just learns from a mixture that nobody has.
#pragma once

#include <ATen/core/Tensor.h>

#include "shardproof/comm/comm.h"

namespace shardproof {

// Collective. Throws Error on every rank, naming the ranks whose tensor has another shape, dtype or other bits than that of
// rank 0. Costs a digest of the tensor and a gather of that.
void check_same_data(const at::Tensor& tensor, Comm& group);

// The tensor of `root` on every rank. The others may give an undefined one; what they give is not looked at. Collective.
at::Tensor broadcast_data(const at::Tensor& tensor, Comm& group, int64_t root = 0);

}  // namespace shardproof
