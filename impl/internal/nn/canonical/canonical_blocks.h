// Canonical attention of some queries by some keys, a block. What is summed over keys or queries stays in units
// (fixed_point.h), so blocks may come in any order, and from anywhere. q [B, heads, queries, width], k and v [B, kv_heads,
// keys, width], float64 and contiguous; a key head serves neighbouring query heads.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "internal/nn/canonical/fixed_point.h"
#include "shardproof/device/model_math.h"

namespace shardproof::canonical_blocks {

// Which queries see which keys of a block, on its device.
struct Sight {
  at::Tensor seen;   // [queries]: how many keys each query sees, the first ones
  at::Tensor first;  // [keys]: the first query that sees each key, the number of queries where none does
  // bool [1 or B, 1, queries, keys]: of the keys seen, those that are hidden all the same. Undefined: none.
  at::Tensor hidden;

  // By where both are in the sequence. Keys are ascending.
  Sight(const std::vector<int64_t>& queries, const std::vector<int64_t>& keys, bool causal, c10::Device device,
        at::Tensor hidden_too = {});
  // Of the rows of matrices of queries by keys.
  SeenOfRows of_rows() const { return {seen.const_data_ptr<int64_t>(), seen.numel()}; }
};

// [B, heads, queries, keys]: (sum u(q k)) / sqrt(width), -infinity where a query does not see a key.
at::Tensor scores(const at::Tensor& q, const at::Tensor& k, const Sight& sight, fixed::Terms& terms);
// The same in the contiguous memory of `out`.
void write_scores(const at::Tensor& q, const at::Tensor& k, const Sight& sight, at::Tensor out, fixed::Terms& terms);
// The largest of each row [B, heads, queries].
at::Tensor largest(const at::Tensor& scores);
// Puts powers in the place of scores: exp(score - most of its row), divided by the divisor [B, heads, queries, 1] of the row if
// there is one.
void raise(at::Tensor scores, const at::Tensor& most, const Sight& sight, const at::Tensor& divisor = {});

// The part of a tensor [B, heads, ..] that belongs to some heads, contiguous.
using Cut = std::function<at::Tensor(const at::Tensor&)>;

// Of each query, in units: sum u(m e v) [B, heads, queries, width] and sum u(e) [B, heads, queries, 1]; e are powers, m is the
// mask of dropout [B, heads, queries, keys], undefined for none.
class Mixture {
 public:
  explicit Mixture(const at::Tensor& q);
  // Of some heads; in the same memory.
  Mixture part(const Cut& cut) const;
  void add(const at::Tensor& powers, const at::Tensor& mask, const at::Tensor& v, const Sight& sight, fixed::Terms& terms);
  at::Tensor divisor() const;  // [B, heads, queries, 1]
  at::Tensor output() const;   // on the grid

 private:
  at::Tensor mixed_, total_;
};

// Gradients, in units.
class Gradients {
 public:
  Gradients(const at::Tensor& q, const at::Tensor& dy, const at::Tensor& output);
  Gradients part(const Cut& cut) const;
  // Adds what the block gives to q's, and to `of_keys` and `of_values`, int64 like k and v. `shares` are powers over divisors.
  // `room` is memory like that of `shares`, or undefined.
  void add(const at::Tensor& k, const at::Tensor& v, const at::Tensor& shares, const at::Tensor& mask, const Sight& sight,
           at::Tensor of_keys, at::Tensor of_values, fixed::Terms& terms, at::Tensor room = {});
  const at::Tensor& of_queries() const { return of_queries_; }

 private:
  at::Tensor q_, dy_, along_, of_queries_;
};

}  // namespace shardproof::canonical_blocks
