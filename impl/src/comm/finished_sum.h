// A sum that is finished (Finish) while its elements are in the cache.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "shardproof/device/device_math.h"

namespace shardproof {

struct SumFinish {
  double factor = 1;         // Finish::factor
  bool asks_finite = false;  // whether anybody wants to know if the sum is finite
};

// Adds `numel` elements of the terms into `target`, and multiplies the sums by the factor. Returns whether all sums are finite
// where that is asked, and true elsewhere. The terms are float32 unless `finish` is the default. One of them may lie at
// `target`.
bool add_and_finish(const DeviceMath& math, Element type, Reduce op, std::vector<const std::byte*> terms, int64_t numel,
                    std::byte* target, const SumFinish& finish);

}  // namespace shardproof
