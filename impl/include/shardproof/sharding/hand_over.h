// For who gives the gradients of a sharded model to somebody else than the library's optimizers, such as to the `.grad` of
// tensors that PyTorch's own optimizers update.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "shardproof/sharding/fully_shard.h"

namespace shardproof {

struct HandedGradients {
  // Parameters that have a gradient: on some rank a backward has reached them since gradients were handed over last. In the
  // order of buckets, by their first names. The same on every rank.
  std::vector<std::string> used;
  // What this rank holds of these gradients, each in one tensor. The memory is the caller's.
  std::vector<Shard> shards;
};

// What this rank holds of the main parameters, and of the final gradients, each in one tensor, where main_parameters() and
// gradients() of the Sharded have a piece for each run of the whole parameter. Those of which it holds nothing are left out.
// Live memory. gradient_shards is collective on a device, where every rank throws NonFiniteError if a gradient of one of them
// was bad (ShardOptions::check_gradients).
std::vector<Shard> main_shards(const Sharded& sharded);
std::vector<Shard> gradient_shards(const Sharded& sharded);

// Hands over the gradients that are final, after which another backward begins anew, and no optimizer of the library finds
// them. Units whose gradients are not reduced yet keep them. Collective over the mesh. Throws Error inside a backward.
HandedGradients hand_over_gradients(Sharded& sharded);

// Ends a step in which somebody else has updated main parameters, as `done` says, and brings the parameters up to date.
// Gradients that are not reduced yet stay. Every rank calls it; otherwise as Sharded::main_parameters_changed.
void end_updated_step(Sharded& sharded, const std::string& done);

// Calls `told(true)` when a backward reaches the model first, and `told(false)` after it has ended, finishing steps included;
// not after one that ends in an exception. One at a time: another call replaces it.
void watch_backwards(Sharded& sharded, std::function<void(bool begins)> told);

}  // namespace shardproof
