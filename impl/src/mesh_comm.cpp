#include "shardproof/mesh_comm.h"

#include <fmt/ranges.h>

#include <algorithm>

#include "shardproof/check.h"

namespace shardproof {

MeshComm::MeshComm(std::shared_ptr<Comm> world, Mesh mesh) : world_(std::move(world)), mesh_(std::move(mesh)) {
  SHARD_REQUIRE(mesh_.size() == world_->size(), "mesh",
                "mesh '{}' has {} ranks, the world '{}' has {} (seen by rank {}). Choose "
                "axis sizes whose product is the world's size",
                mesh_.str(), mesh_.size(), world_->name(), world_->size(), world_->rank());
}

Comm& MeshComm::along(const std::vector<std::string>& axes) {
  std::shared_ptr<Comm>& group = groups_[axes];
  if (group) return *group;
  // Peers are named by their first one; the key is this rank's place among them.
  const std::vector<int64_t> peers = mesh_.peers(rank(), axes);
  const int64_t key = std::find(peers.begin(), peers.end(), rank()) - peers.begin();
  group = world_->split(*std::min_element(peers.begin(), peers.end()), key, fmt::format("{}", fmt::join(axes, "+")));
  return *group;
}

}  // namespace shardproof
