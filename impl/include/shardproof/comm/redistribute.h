// Turns one layout of a tensor into another on the same mesh.
#pragma once

#include <ATen/core/Tensor.h>

#include "shardproof/algebra/layout.h"
#include "shardproof/comm/mesh_comm.h"

namespace shardproof {

// Collective over the mesh. `local` is what this rank holds under `from`, in storage order: of `local_shape` where no flat
// split cuts it, of the box's sizes where a flat split leaves one box, else 1-dim. Returns the same under `to`; a view of
// `local`, not a copy, when the two are the same. Terms of a sum are added ascending by rank, ((x0 + x1) + x2), each addition
// rounded to the dtype. No autograd.
// Throws Error when `local` does not fit `from`, or a layout does not fit shape and mesh.
// Law: equals the transfers of `plan` executed by a loop, bit for bit.
at::Tensor redistribute(const at::Tensor& local, const Shape& shape, const Layout& from, const Layout& to,
                        MeshComm& comms);

}  // namespace shardproof
