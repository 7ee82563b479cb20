// The linear layers of tensor parallelism as nodes of the autograd graph, in plain and in canonical arithmetic.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>

#include "shardproof/comm/comm.h"
#include "shardproof/parallel/tensor/parallel_layers.h"

namespace shardproof {

struct LinearArithmetic {
  bool canonical = false;
  std::string name = {};  // of the layer, in messages of canonical arithmetic
  int64_t pieces = 1;     // as ParallelPlan::overlap_pieces
};

// As column_parallel_linear and row_parallel_linear, which are these in plain arithmetic.
at::Tensor column_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, Comm& group,
                         std::optional<SequenceSplit> sequence, const LinearArithmetic& arithmetic);
at::Tensor row_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, Comm& group,
                      std::optional<int64_t> sequence_dim, const LinearArithmetic& arithmetic);

}  // namespace shardproof
