// How gradients are added: over rounds, over the shards of a replica, over replicas; or as integers, in any order.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "golden/golden.h"

namespace golden {

using Tensors = std::vector<at::Tensor>;  // one a parameter

// sum += terms, which are converted to `dtype` first. The first terms are copied, so that -0.0 survives alone.
void accumulate(Tensors& sum, const Tensors& terms, at::ScalarType dtype);

// One reduction over a group, fed rank by rank.
class Reduction {
 public:
  Reduction(int64_t ranks, const Precision& precision) : ranks_(ranks), precision_(precision) {}

  void add(const Tensors& local);
  // In the gradient dtype. A group of one reduces nothing, so nothing is rounded to the reduce dtype either.
  Tensors result() const;

 private:
  int64_t ranks_;
  Precision precision_;
  Tensors sum_;
};

// Sums that do not depend on any order: integers, see SumOrder::canonical.
class CanonicalSum {
 public:
  void add(const Tensors& gradients);
  // float32
  Tensors result() const;

 private:
  Tensors integers_, lost_;  // lost_: where a term was no integer below 2^62
};

}  // namespace golden
