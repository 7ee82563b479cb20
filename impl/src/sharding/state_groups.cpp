#include "sharding/state_groups.h"

#include <algorithm>

namespace shardproof {

void StateGroup::all_reduce(const at::Tensor& values, Reduce op) const {
  at::Tensor reduced = values;
  for (const std::string& axis : axes) comms->along({axis}).all_reduce(reduced, op).wait();
}

std::vector<StateGroup> state_groups(const Schedule& schedule) {
  std::vector<StateGroup> groups;
  for (Bucket* bucket : schedule.buckets()) {
    std::vector<std::string> axes;
    for (const Split& split : bucket->strategy().state.flat) axes.push_back(split.axis);
    auto group = std::find_if(groups.begin(), groups.end(), [&](const StateGroup& known) {
      return known.comms == bucket->comms() && known.axes == axes;
    });
    if (group == groups.end()) group = groups.insert(group, {bucket->comms(), std::move(axes), {}});
    group->buckets.push_back(bucket);
  }
  return groups;
}

}  // namespace shardproof
