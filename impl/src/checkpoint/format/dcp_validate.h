// What lies where, with its owner, for checks of extents.
#pragma once

#include <string>
#include <vector>

#include "shardproof/checkpoint/format/dcp.h"

namespace shardproof::checkpoint {

// The checkpoint_id of a `.metadata` whose folder has a sidecar, so that one that was lost is missed.
inline constexpr const char* kChecksumsMark = "shardproof";

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
