#include "shardproof/nn/dropout.h"

#include <ATen/ATen.h>

#include "shardproof/nn/dropout_mask.h"

namespace shardproof {

std::vector<DimRows> PlacementAware::rows_in_whole(at::IntArrayRef sizes) const {
  std::vector<DimRows> dims;
  for (const int64_t size : sizes) dims.push_back(whole_rows(size));
  for (const auto& placement : {tensor_placement, context_placement})
    if (placement) placement->to_whole(dims);
  if (!dims.empty())
    for (int64_t& row : dims[0].rows) row += random_stream().first_sample;
  return dims;
}

at::Tensor DropoutImpl::forward(at::Tensor x) {
  if (!is_training() || probability_ == 0) return x;
  const DropoutSite site = next_dropout_site(probability_);
  const at::Tensor mask = dropout_mask(site, rows_in_whole(x.sizes()), x.scalar_type(), x.device());
  return is_canonical() ? canonical_ops::dropout(x, mask) : x * mask;
}

}  // namespace shardproof
