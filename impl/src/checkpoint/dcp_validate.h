// What lies where, with its owner, for checks of extents.
#pragma once

#include <string>
#include <vector>

#include "shardproof/checkpoint/dcp.h"

namespace shardproof::checkpoint {

struct Owned {
  const Extent* extent;
  const StoredTensor* tensor;  // null for a value
  const Chunk* chunk;          // likewise
  const std::string* name;
};
// In order of file and offset. Views the checkpoint.
std::vector<Owned> owned_extents(const Checkpoint& checkpoint);

// "[0:2, 4:8]"
std::string box_text(const Shape& offsets, const Shape& sizes);

}  // namespace shardproof::checkpoint
