// Where the cuts of a bucket fall in what tensor parallelism leaves a rank of a parameter.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>

#include "shardproof/algebra/layout.h"
#include "shardproof/algebra/plan.h"

namespace kit {

// Expects that what each rank holds begins and ends at multiples of the granule, which is asked for with the shape of the part.
inline void expect_between_granules(const std::string& where, const shardproof::Shape& shape, const shardproof::Placement& at,
                                    const std::function<int64_t(const shardproof::Shape& part)>& granule) {
  using namespace shardproof;
  const auto& [mesh, layout] = at;
  if (layout.flat.empty()) return;
  Layout cut = replicated(), of_bucket = replicated();
  cut.dims = layout.dims, of_bucket.flat = layout.flat;
  for (int64_t rank = 0; rank < mesh.size(); ++rank) {
    const Shape part = local_shape(shape, mesh, cut, rank);
    const int64_t size = numel(part);
    if (size == 0) continue;
    for (const Box& box : owned({layout.bucket.length}, mesh, of_bucket, rank)) {
      const int64_t begin = std::clamp<int64_t>(box[0].begin - layout.bucket.offset, 0, size);
      const int64_t end = std::clamp<int64_t>(box[0].end - layout.bucket.offset, 0, size);
      for (const int64_t place : {begin, end})
        EXPECT_TRUE(place == size || place % granule(part) == 0)
            << where << ": rank " << rank << " has [" << begin << ", " << end << ") of " << size << " elements, in granules of "
            << granule(part) << ", by " << layout.str();
    }
  }
}

}  // namespace kit
