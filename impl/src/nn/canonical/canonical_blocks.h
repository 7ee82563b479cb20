// Canonical attention of some queries by some keys, a block. What is summed over keys or queries stays in units
// (fixed_point.h), so blocks may come in any order, and from anywhere. q [B, heads, queries, width], k and v [B, kv_heads,
// keys, width], float64 and contiguous; a key head serves neighbouring query heads.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "nn/canonical/fixed_point.h"

namespace shardproof::canonical_blocks {

// Where queries and keys are in the sequence, both ascending.
struct Places {
  const std::vector<int64_t>&queries, &keys;
  bool causal = true;
  // How many keys the query sees, from the first one on.
  int64_t seen(int64_t query) const;
};

// [B, heads, queries, keys]: (sum u(q k)) / sqrt(width), -infinity where a query does not see a key.
at::Tensor scores(const at::Tensor& q, const at::Tensor& k, const Places& places, fixed::Terms& terms);
// The largest of each row [B, heads, queries].
at::Tensor largest(const at::Tensor& scores);
// Puts powers in the place of scores: exp(score - most of its row), divided by the divisor [B, heads, queries, 1] of the row if
// there is one.
void raise(at::Tensor scores, const at::Tensor& most, const at::Tensor& divisor = {});

// Of each query, in units: sum u(m e v) [B, heads, queries, width] and sum u(e) [B, heads, queries, 1]; e are powers, m is the
// mask of dropout [B, heads, queries, keys], undefined for none.
class Mixture {
 public:
  explicit Mixture(const at::Tensor& q);
  void add(const at::Tensor& powers, const at::Tensor& mask, const at::Tensor& v, fixed::Terms& terms);
  at::Tensor divisor() const;  // [B, heads, queries, 1]
  at::Tensor output() const;   // on the grid

 private:
  at::Tensor mixed_, total_;
};

// Gradients, in units.
class Gradients {
 public:
  Gradients(const at::Tensor& q, const at::Tensor& dy, const at::Tensor& output);
  // Adds what the block gives to q's, and to `of_keys` and `of_values`, int64 like k and v. `shares` are powers over divisors.
  void add(const at::Tensor& k, const at::Tensor& v, const at::Tensor& shares, const at::Tensor& mask, const Places& places,
           at::Tensor of_keys, at::Tensor of_values, fixed::Terms& terms);
  const at::Tensor& of_queries() const { return of_queries_; }

 private:
  at::Tensor q_, dy_, along_, of_queries_;
};

}  // namespace shardproof::canonical_blocks
