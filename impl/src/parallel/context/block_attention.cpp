#include "parallel/context/block_attention.h"

#include <ATen/ATen.h>

#include <cmath>

namespace shardproof {
namespace {

at::Tensor scores_of(const at::Tensor& q, const Block& block) {
  at::Tensor scores = at::matmul(q, block.k.transpose(-2, -1));
  if (!block.hidden.defined()) return scores;
  scores.view({q.size(0), q.size(1), -1, block.hidden.size(2), block.hidden.size(3)})
      .masked_fill_(block.hidden.unsqueeze(2), -INFINITY);
  return scores;
}

}  // namespace

at::Tensor grouped_rows(const at::Tensor& x, int64_t kv_heads) {
  return x.reshape({x.size(0), kv_heads, x.size(1) / kv_heads * x.size(2), x.size(3)});
}

at::Tensor heads_of_rows(const at::Tensor& rows, int64_t heads) {
  return rows.view({rows.size(0), heads, rows.size(1) * rows.size(2) / heads, rows.size(3)});
}

RunningSoftmax::RunningSoftmax(at::Tensor q) : q_(std::move(q)) {
  maximum_ = at::full({q_.size(0), q_.size(1), q_.size(2), 1}, -INFINITY, q_.options());
  sum_ = at::zeros_like(maximum_);
  weighted_ = at::zeros_like(q_);
}

void RunningSoftmax::add(const Block& block) {
  const at::Tensor scores = scores_of(q_, block);
  const at::Tensor maximum = at::maximum(maximum_, scores.amax(-1, /*keepdim=*/true));
  // A query that has seen no key yet has no largest score, which nothing can be subtracted from.
  const at::Tensor most = maximum.masked_fill(maximum == -INFINITY, 0);
  const at::Tensor rescale = (maximum_ - most).exp();
  const at::Tensor weights = (scores - most).exp();
  sum_ = sum_ * rescale + weights.sum(-1, /*keepdim=*/true);
  // Dropout comes after the softmax, so its sum knows nothing of it.
  weighted_ = weighted_ * rescale + at::matmul(block.mask.defined() ? weights * block.mask : weights, block.v);
  maximum_ = maximum;
}

BlockGradients block_backward(const at::Tensor& q, const Block& block, const at::Tensor& log_sum, const at::Tensor& delta,
                              const at::Tensor& output_gradient) {
  const at::Tensor probabilities = (scores_of(q, block) - log_sum).exp();
  at::Tensor of_probabilities = at::matmul(output_gradient, block.v.transpose(-2, -1));
  if (block.mask.defined()) of_probabilities = of_probabilities * block.mask;
  const at::Tensor of_scores = probabilities * (of_probabilities - delta);
  const at::Tensor dropped = block.mask.defined() ? probabilities * block.mask : probabilities;
  return {at::matmul(of_scores, block.k), at::matmul(of_scores.transpose(-2, -1), q),
          at::matmul(dropped.transpose(-2, -1), output_gradient)};
}

}  // namespace shardproof
