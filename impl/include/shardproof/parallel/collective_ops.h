// Differentiable collectives along one group of ranks. The layout of an activation does not determine the layout of its
// gradient. When every rank did the same work with a replicated tensor, its gradient is the same everywhere. When they did
// different work, each rank holds a term of the gradient. So each function below is a pair of a forward and a backward, as in
// Megatron-LM's mappings.py:
//
//   name            forward               backward            input -> output            gradient out -> in
//   copy            nothing               all-reduce          replicated -> replicated   terms -> replicated
//   reduce          all-reduce            nothing             terms -> replicated        replicated -> replicated
//   gather          all-gather            own piece           split -> replicated        replicated -> split
//   scatter         own piece             all-gather          replicated -> split        split -> replicated
//   all_gather      all-gather            reduce-scatter      split -> replicated        terms -> split
//   reduce_scatter  reduce-scatter        all-gather          terms -> split             split -> replicated
//   all_to_all      cuts one dim, joins   the same, dims      split -> split             split -> split
//                   another               swapped
//   exchange_rows   sends rows by counts  sends them back     split -> split             split -> split
//
// A `Sum` says how terms are added, in the direction that has a sum. "Split" means that `dim` is cut evenly as torch.chunk
// cuts: 5 rows over 4 ranks are 2, 2, 1 and 0. `length` is the length of the whole dim. Every rank of the group must call these
// functions, and run their backward, in the same order. Tensors must have equal dtypes and, except along the cut dim, equal
// sizes. The graph keeps the group alive. In a group of one rank each function returns its input. Throws Error when a size does
// not fit the cut.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "shardproof/comm/comm.h"

namespace shardproof::collective {

class Sum {
 public:
  // Terms are added in their dtype, in the way of the group's backend.
  Sum() = default;
  // Terms are float64 multiples of the unit of canonical arithmetic, and are added as integers, so no order changes a bit. A
  // term that is out of range throws NonFiniteError, which says `what` was summed.
  static Sum exact(std::string what);
  bool is_exact() const { return !what_.empty(); }
  const std::string& what() const { return what_; }

 private:
  std::string what_;
};

at::Tensor copy(const at::Tensor& x, Comm& group, const Sum& sum = {});
at::Tensor reduce(const at::Tensor& x, Comm& group, const Sum& sum = {});
at::Tensor gather(const at::Tensor& x, int64_t dim, int64_t length, Comm& group);
at::Tensor scatter(const at::Tensor& x, int64_t dim, Comm& group);
at::Tensor all_gather(const at::Tensor& x, int64_t dim, int64_t length, Comm& group, const Sum& sum = {});
at::Tensor reduce_scatter(const at::Tensor& x, int64_t dim, Comm& group, const Sum& sum = {});
// x is whole along `split_dim` and cut along `concat_dim`, whose whole length is `concat_length`. The result is cut along
// `split_dim` and whole along `concat_dim`.
at::Tensor all_to_all(const at::Tensor& x, int64_t split_dim, int64_t concat_dim, int64_t concat_length, Comm& group);

// x [sum of `sent`, n], of whose rows the first sent[0] go to rank 0, the next to rank 1, and so on -> [sum of `received`, n],
// the rows from rank 0 first. A rank may send and receive no rows.
at::Tensor exchange_rows(const at::Tensor& x, const std::vector<int64_t>& sent, const std::vector<int64_t>& received,
                         Comm& group);

// An asynchronous collective without an autograd graph. `result` waits for it and returns its output. A Pending owns the buffer
// of the collective. So when it is destroyed without `result`, it waits too, except during an exception, which ends the world.
class [[nodiscard]] Pending {
 public:
  // `arrange` makes the output of what the buffer holds in the end; empty: the buffer is the output.
  using Arrange = std::function<at::Tensor(const at::Tensor& buffer)>;
  Pending(Work work, at::Tensor buffer, Arrange arrange = {})
      : work_(std::move(work)), buffer_(std::move(buffer)), arrange_(std::move(arrange)) {}
  Pending(Pending&&) noexcept = default;
  Pending& operator=(Pending&&) = delete;
  ~Pending();
  at::Tensor result();

 private:
  Work work_;
  at::Tensor buffer_;
  Arrange arrange_;
  int exceptions_ = std::uncaught_exceptions();
};
// The output lies in `out`, contiguous or not, which has its sizes and dtype, or in new memory where `out` is undefined. `x`
// must not change before `result`. What lies in the order of the collective is read and written where it is. An all-gather
// copies x only if x is not contiguous, or shorter than other ranks' pieces. It copies its output only if a dim before `dim` is
// longer than 1, or if the ranks do not divide `length`. A reduce-scatter copies its input and output in the same cases, with
// their parts exchanged. An all-reduce copies x unless `out` is x itself.
Pending start_all_reduce(const at::Tensor& x, Comm& group, const Sum& sum = {}, const at::Tensor& out = {});
Pending start_all_gather(const at::Tensor& x, int64_t dim, int64_t length, Comm& group, const at::Tensor& out = {});
Pending start_reduce_scatter(const at::Tensor& x, int64_t dim, Comm& group, const Sum& sum = {}, const at::Tensor& out = {});

}  // namespace shardproof::collective
