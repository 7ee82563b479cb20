#include "shardproof/sharding/rounded_weight.h"

#include <ATen/ATen.h>

#include "shardproof/base/check.h"

namespace shardproof {

at::Tensor rounded_weight(const std::string& name, const at::Tensor& values, Dtype dtype) {
  const at::Tensor rounded = values.to(dtype);
  if (rounded.numel() == 0 || !at::isFloatingType(dtype)) return rounded;
  const at::Tensor lost = at::isfinite(values).logical_and(at::isfinite(rounded).logical_not());
  SHARD_REQUIRE(!lost.any().item<bool>(), "dtype",
                "{}: {} of its values are too large for {}, such as {}, and would be infinite. Choose another dtype", name,
                lost.sum().item<int64_t>(), dtype_name(dtype), values.masked_select(lost)[0].item<double>());
  return rounded;
}

}  // namespace shardproof
