// The arithmetic of the four rules of a split, without checks. Private.
#pragma once

#include <vector>

#include "shardproof/algebra/split.h"

namespace shardproof::detail {

constexpr int64_t kAny = -1;

// A split along an axis that has been looked up. Borrows the split.
struct Cut {
  int64_t axis = 0;   // position in the mesh
  int64_t parts = 1;  // size of that axis
  const Split* split = nullptr;

  // Of a contiguous split.
  Interval piece(int64_t length, int64_t part) const;
  std::vector<SplitRun> pieces(int64_t length, int64_t part) const;
  int64_t piece_size(int64_t length, int64_t part) const;
  // The longest piece of any length up to `length`.
  int64_t piece_size_max(int64_t length) const;
  // Of a contiguous split: the part that holds index `at`, 0 <= at < length. Its piece is not empty.
  int64_t part_at(int64_t length, int64_t at) const;
  // Every part that holds something of `wanted`, runs of [0, length), ascending. Of runs that are held in copies only the part
  // whose number is that of `copy`, modulo the number of copies; kAny: every part.
  std::vector<int64_t> holders(int64_t length, const std::vector<Interval>& wanted, int64_t copy) const;
  // How many neighbours hold the same, as the ranks of copied key heads do; 1 where some part of it is held once.
  int64_t copies(int64_t length) const;
};

// Why the rule does not fit `length` and `parts`; empty when it fits. `clamps`: the length may be shorter than the rule's own.
std::string misfit(const Split& split, int64_t length, int64_t parts, const std::string& what, bool clamps = false);

}  // namespace shardproof::detail
