// A Sharded as Python holds it.
#pragma once

#include <memory>

#include "mirror.h"
#include "shardproof/sharding/fully_shard.h"

namespace shardproof::python {

// Beside the library's object, the modules that it shards.
struct ShardedMirror {
  std::shared_ptr<Mirror> mirror;
  std::shared_ptr<MeshComm> comms;
  Sharded sharded;
};

}  // namespace shardproof::python
