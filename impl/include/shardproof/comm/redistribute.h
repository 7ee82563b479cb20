// Moves a tensor from one layout to another on the same mesh.
#pragma once

#include <ATen/core/Tensor.h>

#include "shardproof/algebra/layout.h"
#include "shardproof/comm/mesh_comm.h"

namespace shardproof {

// `local` is what this rank holds under `from`, in storage order. Its shape is `local_shape` where no flat split cuts it, the
// sizes of the box where a flat split leaves one box, and 1-dim elsewhere; it may
// always be 1-dim. Returns what this rank holds under `to`, in the same
// form; when both layouts mean the same it is a view of `local`. Terms of a sum are added in ascending order of ranks, ((x0 +
// x1) + x2), and each addition is rounded to the dtype. Autograd does not see it. Throws Error when `local` does not fit
// `from`, or when a layout does not fit the shape and the mesh. Collective over the mesh. Law: the result has the bits of a
// loop that executes the transfers of `plan` (plan.h).
at::Tensor redistribute(const at::Tensor& local, const Shape& shape, const Layout& from, const Layout& to,
                        MeshComm& comms);

}  // namespace shardproof
