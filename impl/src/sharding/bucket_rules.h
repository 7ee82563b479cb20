// What a bucket does with numbers: dtypes, divisions, and along which axes sums go.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <string>
#include <vector>

#include "sharding/reduction.h"
#include "shardproof/sharding/shard_options.h"

namespace shardproof {

struct BucketRules {
  at::ScalarType compute = at::kFloat, main = at::kFloat;
  ReductionDtypes reduction;
  double divide_before = 1, divide_after = 1;
  bool check_gradients = true;
  double gradient_magnitude_max = 0;
  bool broadcast = true;
  Gather gather = Gather::copied;
  bool offload = false;
  Publish publish = Publish::in_step;
  int64_t grad_partial_ranks = 1;     // so many neighbours along the tensor-parallel axis hold terms of the gradients
  std::vector<std::string> sum_axes;  // along which gradients are partial
};

// Fills in what options leave open. `stored` is the dtype of the module's parameters. A term of their gradients is the sum over
// the batches of `batches` ranks, of experts those that share them. Throws Error where the options contradict each other.
BucketRules resolve(const ShardOptions& options, const Strategy& strategy, const Mesh& mesh, int64_t batches,
                    at::ScalarType stored);

}  // namespace shardproof
