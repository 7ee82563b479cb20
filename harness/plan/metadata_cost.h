// What the description of a checkpoint takes to write and to read, without any entry.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "shardproof/sharding/piece.h"

namespace harness {

struct MetadataCost {
  int64_t boxes = 0;  // that ranks write: what the metadata lists
  int64_t bytes = 0;  // of `.metadata` and the sidecar
  // Seconds. `write` and `read` are those of both texts, and `read` includes all that is validated.
  double write = 0, read = 0;
};

// Of a checkpoint of parameters that lie so, with the two moments of AdamW.
MetadataCost metadata_cost(const std::map<std::string, shardproof::ParameterPlacement>& placements);

}  // namespace harness
