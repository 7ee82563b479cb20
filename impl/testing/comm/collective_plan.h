// Which rank sends which elements to whom in a collective, and which of them each rank adds up: a pure function of the call,
// the rank and the size of the group. Nothing is sent here. Every backend that moves elements itself follows this plan.
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

// What one rank does in a collective. The plans of all ranks fit together: what rank a gives to rank b is as long as what b
// takes from a.
class CollectivePlan {
 public:
  // A valid call, but no send or receive.
  CollectivePlan(const Call& call, int64_t rank, int64_t size, AllReduceBy all_reduce = AllReduceBy::whole);

  bool sums() const { return op_ == Op::reduce_scatter || op_ == Op::all_reduce; }

  // Elements of this rank's input that the peer needs. The peer may be this rank.
  ElementRange gives(int64_t peer) const;
  // What comes from the peer, or from this rank itself. Without sums: where it lies in this rank's output. Of a sum: where it
  // lies in the peer's input, which is the same range for every peer.
  ElementRange takes(int64_t peer) const;

  // Of a sum: the elements of everybody's input that this rank adds up, and where the sum lies in its output.
  ElementRange summed() const;
  ElementRange result() const;

  // The second exchange of an all-reduce in slices: every rank gives its result to all, and takes this range of its output from
  // the peer. Empty for all other calls.
  ElementRange takes_sum(int64_t peer) const;

 private:
  bool in_slices() const { return op_ == Op::all_reduce && all_reduce_ == AllReduceBy::slices; }

  Op op_;
  int64_t rank_, size_;
  AllReduceBy all_reduce_;
  int64_t root_ = -1;
  int64_t input_numel_ = 0, output_numel_ = 0;
  std::vector<ElementRange> gives_, takes_;  // of an all-to-all, by peer
};

}  // namespace shardproof
