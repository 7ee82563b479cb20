// Attention of a run of queries to one run of keys after the other: softmax merged by running maximum and sum, and its
// backward from what was kept of the whole softmax. Query heads of one key head lie behind each other as rows, [B, kv_heads,
// g * T, head].
#pragma once

#include <ATen/core/Tensor.h>

namespace shardproof {

// [B, heads, T, head] -> rows of `kv_heads`, and back.
at::Tensor grouped_rows(const at::Tensor& x, int64_t kv_heads);
at::Tensor heads_of_rows(const at::Tensor& rows, int64_t heads);

struct Block {
  at::Tensor k, v;        // [B, kv_heads, keys, head]
  at::Tensor hidden;      // which keys are hidden from which queries, bool [1 or B, 1, T, keys]; undefined where none is
  at::Tensor mask = {};   // of dropout, in the shape of the scores; undefined without
};

class RunningSoftmax {
 public:
  // `q` as rows, scaled already.
  explicit RunningSoftmax(at::Tensor q);
  void add(const Block& block);
  at::Tensor output() const { return weighted_ / sum_; }
  // Of exp(score) over all keys: all that the backward needs of the softmax. [B, kv_heads, rows, 1].
  at::Tensor log_sum() const { return maximum_ + sum_.log(); }

 private:
  at::Tensor q_, maximum_, sum_, weighted_;
};

// What attention at one block adds to gradients. `delta` is the row sum of output times its gradient.
struct BlockGradients {
  at::Tensor q, k, v;  // of the scaled q
};
BlockGradients block_backward(const at::Tensor& q, const Block& block, const at::Tensor& log_sum, const at::Tensor& delta,
                              const at::Tensor& output_gradient);

}  // namespace shardproof
