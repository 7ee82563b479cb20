// Attention whose keys and values travel around a group of ranks, from each to the next.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <optional>
#include <utility>
#include <vector>

#include "parallel/context/block_attention.h"
#include "parallel/context/ring.h"
#include "shardproof/algebra/context_cut.h"
#include "shardproof/comm/comm.h"
#include "shardproof/nn/attention.h"

namespace shardproof {

class ContextRing : public torch::CustomClassHolder {
 public:
  ContextRing(const DimCut& cut, AttentionSight sight, std::optional<AttentionDropout> dropout, Comm& group);

  // The output, and the logarithm of each row's sum [B, heads, T, 1]. Collective.
  std::pair<at::Tensor, at::Tensor> forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) const;

  struct Kept {
    at::Tensor q, k, v, output, log_sum;
  };
  struct Gradients {
    at::Tensor q, k, v;
  };
  Gradients backward(const Kept& kept, const at::Tensor& output_gradient) const;

 private:
  // Consecutive positions of one rank, and where its tensors have them.
  struct Run {
    Interval positions;
    int64_t local = 0;
    at::Tensor of(const at::Tensor& x) const { return x.narrow(-2, local, positions.size()); }
    at::Tensor rows(c10::Device device) const;  // their positions, int64
  };
  std::vector<Run> runs_of(int64_t rank) const;
  // Whether no query sees any of the keys, by position alone.
  bool hides(const Run& queries, const Run& keys) const;
  Block block(const Run& queries, const Run& keys, const at::Tensor& both) const;

  Ring ring_;
  AttentionSight sight_;
  std::optional<AttentionDropout> dropout_;
};

}  // namespace shardproof
