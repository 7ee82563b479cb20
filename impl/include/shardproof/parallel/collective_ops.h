// Differentiable collectives along one group of ranks. The layout of an activation does not say what its gradient is: a tensor
// that every rank holds has the same gradient everywhere when every rank did the same work with it, and terms of a sum when
// they did different work. So each name below stands for a pair, forward and backward:
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
//
// A `Sum` says how terms are added, in whichever direction the pair has a sum. "Split" is cut evenly along `dim` as
// torch.chunk cuts, 5 over 4 ranks is 2,2,1,0; `length` is of the whole. Every rank of the group must call, and run the
// backward, in the same order, on tensors of equal dtype and, but for the cut dim, equal sizes. The graph keeps the group
// alive. In a group of one each returns its input. Throws Error when a size does not fit the cut.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <exception>
#include <string>

#include "shardproof/comm/comm.h"

namespace shardproof::collective {

class Sum {
 public:
  // In the dtype of the terms, as the group's backend adds.
  Sum() = default;
  // Of float64 terms on the grid of canonical arithmetic, as integers: no order changes a bit. A term that is out of range
  // throws NonFiniteError, which names `what` is summed.
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
// x is whole along `split_dim` and cut along `concat_dim`, whose whole length is `concat_length`; the result the other way
// round.
at::Tensor all_to_all(const at::Tensor& x, int64_t split_dim, int64_t concat_dim, int64_t concat_length, Comm& group);

// The same without a graph, and asynchronous: `result` has the output, after the collective. One that is dropped without it
// waits for the collective, whose buffer it owns; not when it goes because of an exception, after which the world ends.
class [[nodiscard]] Pending {
 public:
  Pending(Work work, at::Tensor buffer, int64_t dim, int64_t rows, bool in_units = false)
      : work_(std::move(work)), buffer_(std::move(buffer)), dim_(dim), rows_(rows), in_units_(in_units) {}
  Pending(Pending&&) noexcept = default;
  Pending& operator=(Pending&&) = delete;
  ~Pending();
  [[nodiscard]] at::Tensor result();

 private:
  Work work_;
  at::Tensor buffer_;
  int64_t dim_, rows_;  // the first `rows` of the buffer, moved to dim
  bool in_units_;        // the buffer is the integers of an exact sum
  int exceptions_ = std::uncaught_exceptions();
};
Pending start_all_reduce(const at::Tensor& x, Comm& group, const Sum& sum = {});
Pending start_all_gather(const at::Tensor& x, int64_t dim, int64_t length, Comm& group);
Pending start_reduce_scatter(const at::Tensor& x, int64_t dim, Comm& group, const Sum& sum = {});

}  // namespace shardproof::collective
