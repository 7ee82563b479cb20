#include "golden/attention.h"

#include <ATen/ATen.h>

#include <cmath>
#include <limits>

namespace golden {

at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, Dropout& dropout,
                            const at::Tensor& hidden) {
  if (!dropout.drops() && hidden.defined()) return at::scaled_dot_product_attention(q, k, v, hidden.logical_not());
  if (!dropout.drops()) return at::scaled_dot_product_attention(q, k, v, {}, 0.0, /*is_causal=*/true);
  const int64_t length = q.size(2);
  const at::Tensor future = at::ones({length, length}, at::kBool).triu(1).to(q.device());
  at::Tensor scores = at::matmul(q / std::sqrt(static_cast<double>(q.size(3))), k.transpose(2, 3));
  scores = scores.masked_fill(hidden.defined() ? hidden : future, -std::numeric_limits<double>::infinity());
  return at::matmul(dropout(at::softmax(scores, -1)), v);
}

}  // namespace golden
