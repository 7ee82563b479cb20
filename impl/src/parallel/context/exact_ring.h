// Attention around a ring with canonical arithmetic. Keys go round once for every query's largest score, then keys and values
// for the sums over them, which are exact, so that it does not matter who begins; in the backward keys, values and the sums of
// their gradients go round together, and the sums one step further, home.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <optional>
#include <string>
#include <vector>

#include "internal/nn/canonical/canonical_blocks.h"
#include "parallel/context/ring.h"
#include "shardproof/algebra/context_cut.h"
#include "shardproof/comm/comm.h"
#include "shardproof/nn/attention.h"

namespace shardproof {

class ExactRing : public torch::CustomClassHolder {
 public:
  ExactRing(const DimCut& cut, AttentionSight sight, std::optional<AttentionDropout> dropout, std::string name, Comm& group);

  struct Kept {
    at::Tensor q, k, v, output;
    at::Tensor most, divisor;  // of each query: its largest score, the sum of its powers
  };
  // Collective; as are backwards.
  Kept forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) const;

  struct Gradients {
    at::Tensor q, k, v;
  };
  Gradients backward(const Kept& kept, const at::Tensor& output_gradient) const;

 private:
  struct Block {
    canonical_blocks::Sight sight;
    at::Tensor mask;
  };
  Block block(int64_t source, bool with_mask, c10::Device device) const;

  Ring ring_;
  AttentionSight sight_;
  std::optional<AttentionDropout> dropout_;
  std::string name_;
  std::vector<int64_t> own_;  // this rank's positions
};

}  // namespace shardproof
