// Moves a tensor from one layout to another, on the same mesh or between two.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "shardproof/algebra/layout.h"
#include "shardproof/algebra/plan.h"
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

// A tensor that lies on some ranks of a group and shall lie on some, which may be others, or the same in another arrangement.
struct Move {
  Shape shape;
  Placement from, to;                         // nothing partial
  std::vector<int64_t> from_ranks, to_ranks;  // ranks of the group, by their numbers in each placement's mesh
};

// Copies what the ranks of `from` hold to those of `to`. `source` and `target` are 1-dim, in storage order, and undefined on
// ranks that are not on their side. They may differ in dtype: values travel in the source's, and are converted where they
// arrive. `allocate(elements)` gives memory of the source's dtype, on every rank. It is asked for what leaves the rank and for
// what arrives, for at most `elements_at_once` each; or, where that is more, for one index of dim 0, times the number of ranks
// that are to hold it. Every rank passes an equal move and an equal `elements_at_once`. Throws Error when a layout is partial.
// Collective over the group. Law: targets hold the bits that a loop over the transfers of `plan` gives them.
void move_between(const Move& move, const at::Tensor& source, const at::Tensor& target, Comm& group,
                  int64_t elements_at_once, const std::function<at::Tensor(int64_t elements)>& allocate);

}  // namespace shardproof
