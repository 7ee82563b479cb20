// Masks of dropout where they are needed.
#pragma once

#include <c10/core/Device.h>

#include "shardproof/nn/random.h"

namespace shardproof {

// The mask of random.h, made on the device, with the same bits on each.
at::Tensor dropout_mask(const DropoutSite& site, const std::vector<DimRows>& dims, at::ScalarType dtype, c10::Device device);

}  // namespace shardproof
