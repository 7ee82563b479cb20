#include "comm/split_group.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>

#include "internal/base/counter_random.h"
#include "comm/owning_tensor.h"

namespace shardproof {

std::vector<int64_t> tell_colors(Comm& parent, int64_t color, int64_t key) {
  const at::Tensor mine = owning_tensor<int64_t>({color, key}),
                   all = owning_tensor(std::vector<int64_t>(static_cast<size_t>(2 * parent.size())));
  parent.issue({.op = Op::split, .output = all, .input = mine}).wait();
  const auto* told = all.const_data_ptr<int64_t>();
  return {told, told + all.numel()};
}

SplitGroup split_group(const std::vector<int64_t>& colors_and_keys, int64_t rank_in_parent,
                       const std::vector<int64_t>& world_ranks_of_parent, uint64_t id_of_parent, uint64_t number) {
  const auto color_of = [&](int64_t rank) { return colors_and_keys[static_cast<size_t>(2 * rank)]; };
  const auto key_of = [&](int64_t rank) { return colors_and_keys[static_cast<size_t>(2 * rank + 1)]; };
  SplitGroup group;
  if (color_of(rank_in_parent) < 0) return group;
  std::vector<std::pair<int64_t, int64_t>> members;  // key, rank in the parent
  for (int64_t r = 0; r < std::ssize(world_ranks_of_parent); ++r)
    if (color_of(r) == color_of(rank_in_parent)) members.emplace_back(key_of(r), r);
  std::sort(members.begin(), members.end());
  for (size_t i = 0; i < members.size(); ++i) {
    if (members[i].second == rank_in_parent) group.rank = static_cast<int64_t>(i);
    group.world_ranks.push_back(world_ranks_of_parent[static_cast<size_t>(members[i].second)]);
  }
  group.color = members[0].second;
  // A chain of parent, number of the split, and first member.
  group.id = id_of_parent;
  for (const uint64_t value : {number + 1, static_cast<uint64_t>(group.world_ranks[0]) + 1})
    group.id = counter_mix(group.id ^ value);
  return group;
}

}  // namespace shardproof
