// The collectives of collective_ops.h that sum, for float64 values on the grid of canonical arithmetic: sums over ranks are of
// integers, so no order matters. Errors name `what`.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>

#include "shardproof/comm/comm.h"

namespace shardproof::exact {

at::Tensor copy(const at::Tensor& x, Comm& group, const std::string& what);
at::Tensor reduce(const at::Tensor& x, Comm& group, const std::string& what);
at::Tensor all_gather(const at::Tensor& x, int64_t dim, int64_t length, Comm& group, const std::string& what);
at::Tensor reduce_scatter(const at::Tensor& x, int64_t dim, Comm& group, const std::string& what);

// k and v as they are; their gradients are summed over the group for its rank 0, the others get zeros.
std::pair<at::Tensor, at::Tensor> sum_to_first(const at::Tensor& k, const at::Tensor& v, Comm& group, const std::string& what);

}  // namespace shardproof::exact
