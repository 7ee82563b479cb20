// Which rank sends which elements to which rank in a collective, and which of them each rank adds up. The plan is a pure
// function of the call, the rank and the size of the group. Nothing is sent here. Every backend that moves elements follows it.
#pragma once

#include <cstdint>
#include <vector>

#include "shardproof/comm/comm.h"

namespace shardproof {

// Elements [begin, begin + length) of a flat tensor.
struct ElementRange {
  int64_t begin = 0, length = 0;

  int64_t end() const { return begin + length; }
  friend bool operator==(const ElementRange&, const ElementRange&) = default;
};

// Range `part` of `numel` elements that are dealt out over `parts` in equal shares. Shares are rounded up, so the last ranges
// may be shorter, or empty.
ElementRange equal_range(int64_t numel, int64_t part, int64_t parts);

// The ranks in the order in which their terms of a sum are added: first, first + 1, ..., and after the last rank 0, 1, ....
// Sums have the same bits on all backends because all of them begin with rank 0.
std::vector<int64_t> order_of_terms(int64_t ranks, int64_t first = 0);

// How the ranks of an all-reduce share the work. The bits are the same.
enum class AllReduceBy {
  whole,   // every rank gets all terms and adds up everything: one exchange
  slices,  // every rank gets the terms of one slice, adds them up, and sends the sum to all: two exchanges
};

// What one rank does in a collective. Law: what the plan of rank a sends to b is as long as what the plan of b receives from a.
class CollectivePlan {
 public:
  // A valid call, but no send or receive.
  CollectivePlan(const Call& call, int64_t rank, int64_t size, AllReduceBy all_reduce = AllReduceBy::whole);

  bool sums() const { return op_ == Op::reduce_scatter || op_ == Op::all_reduce; }

  // The elements of this rank's input that it sends to the peer. The peer may be this rank.
  ElementRange send_range(int64_t peer) const;
  // The elements that this rank receives from the peer, which may be itself. For a call without a sum it is their range in
  // this rank's output. For a sum it is their range in the peer's input, which is the same for every peer.
  ElementRange recv_range(int64_t peer) const;

  // For a sum: the elements of all ranks' inputs that this rank adds up, and where the sum lies in its output.
  ElementRange summed() const;
  ElementRange result() const;

  // In the second exchange of an all-reduce in slices every rank sends its result to all others, and receives this range of its
  // output from the peer. Empty for all other calls.
  ElementRange recv_sum_range(int64_t peer) const;

 private:
  bool in_slices() const { return op_ == Op::all_reduce && all_reduce_ == AllReduceBy::slices; }

  Op op_;
  int64_t rank_, size_;
  AllReduceBy all_reduce_;
  int64_t root_ = -1;
  int64_t input_numel_ = 0, output_numel_ = 0;
  std::vector<ElementRange> input_ranges_, output_ranges_;  // for an all-to-all, by peer
};

}  // namespace shardproof
