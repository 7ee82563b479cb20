// Weights in another dtype.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "shardproof/base/dtypes.h"

namespace shardproof {

// The values in the dtype, as files and models that are written get them. Throws Error, which says `name`, where a finite
// number would be infinite.
at::Tensor rounded_weight(const std::string& name, const at::Tensor& values, Dtype dtype);

}  // namespace shardproof
