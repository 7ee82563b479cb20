#include "parallel/context/ring_pass.h"

#include <ATen/ATen.h>

namespace shardproof {

RingPass::RingPass(const at::Tensor& mine, int64_t dim, int64_t rows, Comm& group) : mine_(mine) {
  std::vector<int64_t> sizes = mine.sizes().vec();
  sizes[static_cast<size_t>(dim)] = rows;
  arriving_ = at::empty(sizes, mine.options());
  sent_ = group.send(mine_, (group.rank() + 1) % group.size());
  received_ = group.recv(arriving_, ring_before(group.rank(), group));
}

at::Tensor RingPass::wait() {
  sent_.wait();
  received_.wait();
  return arriving_;
}

}  // namespace shardproof
