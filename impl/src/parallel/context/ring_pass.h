// A step of a ring: what this rank has goes to the next, what the one before has arrives.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "shardproof/comm/comm.h"

namespace shardproof {

inline int64_t ring_before(int64_t rank, const Comm& group) {
  return (rank + group.size() - 1) % group.size();
}

// Underway until wait(), which gives what arrived. `mine` must stay as it is until then.
class RingPass {
 public:
  // What arrives has the sizes of `mine`, but for `rows` along dim.
  RingPass(const at::Tensor& mine, int64_t dim, int64_t rows, Comm& group);
  at::Tensor wait();

 private:
  at::Tensor mine_, arriving_;
  Work sent_, received_;
};

}  // namespace shardproof
