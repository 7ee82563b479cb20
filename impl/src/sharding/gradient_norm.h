// The norm of a sharded gradient.
#pragma once

#include "shardproof/sharding/fully_shard.h"

namespace shardproof {

// Of order 1, 2 or infinity, over parameters that require gradients. Collective over the axes that split the optimizer's
// state and the tensor-parallel one.
// Throws NonFiniteError. `ordered` and `canonical` sums are exact for all dtypes but float64, which is added up in double in
// rank order.
double gradient_norm(Sharded::Impl& state, double order);

}  // namespace shardproof
