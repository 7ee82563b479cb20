#include "shardproof/parallel/tensor/parallel_layers.h"

#include <ATen/ATen.h>

#include "shardproof/nn/gradient_place.h"
#include "shardproof/parallel/collective_ops.h"

namespace shardproof {

at::Tensor vocab_parallel_embedding(const at::Tensor& tokens, const at::Tensor& weight, int64_t first_row, Comm& group,
                                    std::optional<int64_t> sequence_dim, int64_t padding_index) {
  const int64_t rows = weight.size(0);
  const int64_t padding = padding_index >= first_row && padding_index < first_row + rows ? padding_index - first_row : -1;
  if (group.size() == 1) return direct::embedding(weight, tokens, padding);
  const at::Tensor local = tokens - first_row, here = (local >= 0).logical_and(local < rows);
  at::Tensor found;
  if (rows == 0) {
    std::vector<int64_t> sizes = tokens.sizes().vec();
    sizes.push_back(weight.size(1));
    found = at::zeros(sizes, weight.options()) + weight.sum();  // so that a backward passes here as on other ranks
  } else {
    found = at::where(here.unsqueeze(-1), direct::embedding(weight, at::where(here, local, 0), padding), 0);
  }
  return sequence_dim ? collective::reduce_scatter(found, *sequence_dim, group) : collective::reduce(found, group);
}

}  // namespace shardproof
