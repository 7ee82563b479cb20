// A process group of PyTorch whose backend for the fake device is as unkind as NCCL's (ProcessGroupNCCL.cpp): `wait` only lets
// the caller's current stream wait and never throws, tags are ignored, messages of a pair go one after the other on one stream,
// and the first of a pair stops the host until its peer is there. It takes no tensors of the CPU; a backend of their own takes
// those. Its ranks are rank-threads that share the fake device.
#pragma once

#include <memory>

#include "harness/run/ranks.h"
#include "shardproof/comm/comm.h"

namespace unkind {

// The library's communicator over such a group of all ranks, and unless `makes_groups` is false over others along axes, as a
// program has them that PyTorch started. Collective.
std::shared_ptr<shardproof::Comm> world_over(std::shared_ptr<shardproof::Comm> ranks, bool makes_groups = true);

// Rank-threads that train over such groups.
std::unique_ptr<harness::Ranks> ranks();

}  // namespace unkind
