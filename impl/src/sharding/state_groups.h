// Which ranks share the optimizer's state between them: not the same for all units where some have a strategy of their own.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "sharding/schedule.h"

namespace shardproof {

// Buckets whose state is split over the same axes of the same mesh, in the order of the schedule.
struct StateGroup {
  std::shared_ptr<MeshComm> comms;
  std::vector<std::string> axes;
  std::vector<Bucket*> buckets;

  // Along one axis after the other. Collective over the ranks that share the state.
  void all_reduce(const at::Tensor& values, Reduce op) const;
};

// Every bucket is in one group. The same on every rank.
std::vector<StateGroup> state_groups(const Schedule& schedule);

}  // namespace shardproof
