#include "transition.h"

#include <ATen/ATen.h>

#include "shardproof/check.h"

namespace shardproof {

Work start_transition(MeshComm& comms, const Lowered& lowered, const at::Tensor& output, const at::Tensor& input) {
  switch (lowered.step) {
    case Step::none:
      SHARD_CHECK(output.data_ptr() == input.data_ptr(), "transition", "no step joins two different buffers");
      return {};
    case Step::all_gather:
      return comms.along(lowered.axes).all_gather(output, input);
    case Step::reduce_scatter:
      return comms.along(lowered.axes).reduce_scatter(output, input, Reduce::sum);
    case Step::all_reduce:
      SHARD_CHECK(output.data_ptr() == input.data_ptr(), "transition", "an all_reduce runs in place");
      return comms.along(lowered.axes).all_reduce(output, Reduce::sum);
    case Step::slice:
    case Step::all_to_all:
    case Step::general:
      break;
  }
  throw Error(fmt::format("[strategy] buckets move by all_gather, reduce_scatter and all_reduce; this strategy's layouts ask "
                          "for a {} step. Choose layouts that differ in one split or partial axis",
                          to_string(lowered.step)));
}

}  // namespace shardproof
