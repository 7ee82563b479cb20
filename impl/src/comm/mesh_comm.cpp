#include "shardproof/comm/mesh_comm.h"

#include <fmt/ranges.h>

#include <array>

#include "shardproof/algebra/axes.h"
#include "shardproof/base/check.h"

namespace shardproof {
namespace {

constexpr std::array kDataAxes = {axes::dp_replicate, axes::dp_shard};

}  // namespace

MeshComm::MeshComm(std::shared_ptr<Comm> world, Mesh mesh) : world_(std::move(world)), mesh_(std::move(mesh)) {
  SHARD_REQUIRE(mesh_.size() == world_->size(), "mesh",
                "mesh '{}' has {} ranks, the world '{}' has {} (seen by rank {}). Choose "
                "axis sizes whose product is the world's size",
                mesh_.str(), mesh_.size(), world_->name(), world_->size(), world_->rank());
}

int64_t MeshComm::data_rank() const {
  int64_t place = 0;
  for (const char* axis : kDataAxes)
    if (mesh_.has(axis)) place = place * mesh_.size(axis) + mesh_.coordinate(rank(), axis);
  return place;
}

int64_t MeshComm::data_size() const {
  int64_t size = 1;
  for (const char* axis : kDataAxes)
    if (mesh_.has(axis)) size *= mesh_.size(axis);
  return size;
}

Comm& MeshComm::along(const std::vector<std::string>& axes) {
  std::shared_ptr<Comm>& group = groups_[axes];
  if (group) return *group;
  group = world_->split_ranks(mesh_.peers(rank(), axes), fmt::format("{}", fmt::join(axes, "+")));
  return *group;
}

Comm& MeshComm::within(const std::string& axis, int64_t ranks) {
  std::shared_ptr<Comm>& group = neighbours_[{axis, ranks}];
  if (group) return *group;
  const int64_t size = mesh_.size(axis);
  SHARD_REQUIRE(ranks >= 1 && size % ranks == 0, "mesh", "groups of {} ranks along {}: its size {} is not a multiple", ranks,
                axis, size);
  const std::vector<int64_t> all = mesh_.peers(rank(), {axis});
  const auto first = all.begin() + mesh_.coordinate(rank(), axis) / ranks * ranks;
  group = world_->split_ranks({first, first + ranks}, fmt::format("{}/{}", axis, ranks));
  return *group;
}

}  // namespace shardproof
