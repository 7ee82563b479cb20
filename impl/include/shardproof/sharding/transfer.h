// Fills one sharded model with the parameters and buffers of another one, which may lie on other ranks, on another mesh and
// under another strategy: a trainer under ZeRO-3 fills an inference model under tensor parallelism, say.
//
//   Sharded trained = fully_shard(model, comms, ...);                   // on ranks 0 to 7
//   Sharded serving = fully_shard(copy, other_comms, ...);              // the same ranks, some of them, or others
//   transfer(world, is_trainer ? &trained : nullptr, is_server ? &serving : nullptr);
//
// Beyond its part of both models no rank holds a whole model, nor a large parameter: what a rank lacks travels in slices of
// TransferOptions::bytes_at_once. What has to move, and from which of several copies, is `plan` of algebra/plan.h.
#pragma once

#include <cstdint>

#include "shardproof/comm/comm.h"
#include "shardproof/sharding/fully_shard.h"

namespace shardproof {

struct TransferOptions {
  // A rank holds at most this many bytes for what leaves it, and as many for what arrives, besides its part of both models. One
  // index of the first dim of a parameter travels at once in any case, once for each rank that holds a copy of it.
  int64_t bytes_at_once = int64_t{64} << 20;
};

// Copies every main parameter of `from` into the main parameter of `to` of the same name, rounded to the main dtype there, and
// brings the parameters of `to` up to date. Names are those of the whole models, and a tied parameter may be untied on the
// other side. Copies every buffer of state (nn/state_buffers.h) of rank 0 of `from` into that of the same name on every rank of
// `to`. Optimizer state and other buffers stay as they are. While averages are in the place of the parameters of `from`
// (optim/ema.h), the averages are copied.
//
// `world` has every rank of both meshes, and may have more. A rank passes a null pointer for a side on which it has no part.
// Throws Error on every rank of `world`, with nothing written, when one of the two models has a parameter or a buffer that the
// other lacks (the message suggests a name that is near), or one of another shape; when a side is there on no rank, or on ranks
// that are not all of one mesh; inside a backward of either; or when averages are in the place of the parameters of `to`.
// Collective over `world`. Laws: `to` holds the bits of gather_main_parameters of `from`, rounded; there and back changes no
// bit where the dtypes are equal.
void transfer(Comm& world, const Sharded* from, Sharded* to, const TransferOptions& options = {});

}  // namespace shardproof
