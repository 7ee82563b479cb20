// Who is in which group after a split. Every rank of the parent works it out for itself from what all of them tell each other.
#pragma once

#include <cstdint>
#include <vector>

#include "shardproof/comm/comm.h"

namespace shardproof {

struct SplitGroup {
  // For who takes ints only: the same for all members, and for no other group of this split; -1 where this rank joins none, and
  // then there is nothing below.
  int64_t color = -1;
  int64_t rank = 0;                  // of this rank in the group
  std::vector<int64_t> world_ranks;  // of its members
  uint64_t id = 0;                   // the same on all of them, and of no other group
};

// Collective over the parent: everybody's color and key, by rank. When it returns everybody has called.
std::vector<int64_t> tell_colors(Comm& parent, int64_t color, int64_t key);

// `number`: of this split among the parent's.
SplitGroup split_group(const std::vector<int64_t>& colors_and_keys, int64_t rank_in_parent,
                       const std::vector<int64_t>& world_ranks_of_parent, uint64_t id_of_parent, uint64_t number);

}  // namespace shardproof
