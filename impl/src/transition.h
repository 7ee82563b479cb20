// Runs one lowered step on a bucket's buffers, without copies beyond the collective's own.
#pragma once

#include "shardproof/mesh_comm.h"
#include "shardproof/plan.h"

namespace shardproof {

// input: this rank's part in the source layout; output: in the target layout. They may share memory where the collective
// allows it (all_gather of a slice of the output; all_reduce, which must be in place). `none` and `slice` copy nothing when
// the memory is already the same. Collective over lowered.axes.
Work start_transition(MeshComm& comms, const Lowered& lowered, const at::Tensor& output, const at::Tensor& input);

}  // namespace shardproof
