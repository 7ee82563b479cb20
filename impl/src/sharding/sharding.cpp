#include "shardproof/sharding/fully_shard.h"

#include "sharding/shard_build.h"
#include "shardproof/base/check.h"

namespace shardproof {

Sharded fully_shard(std::shared_ptr<torch::nn::Module> module, std::shared_ptr<MeshComm> comms, ShardOptions options) {
  return Sharding(std::move(comms), std::move(options)).shard(std::move(module));
}

Sharding& Sharding::unit(Modules modules, UnitOptions options) {
  SHARD_REQUIRE(!modules.empty(), "fully_shard", "a unit needs at least one module, got none");
  for (const auto& module : modules) SHARD_REQUIRE(module != nullptr, "fully_shard", "a unit's module is null");
  entries_.push_back({std::move(modules), std::move(options)});
  return *this;
}

Sharded Sharding::shard(std::shared_ptr<torch::nn::Module> root) const {
  SHARD_REQUIRE(root != nullptr && comms_ != nullptr, "fully_shard", "needs a module and a mesh's communicators, got null");
  auto impl = build_sharded(std::move(root), comms_, options_, entries_);
  impl->schedule.set_finish([held = std::weak_ptr<Sharded::Impl>(impl)] {
    if (const auto alive = held.lock()) alive->finish(alive);
  });
  return Sharded(std::move(impl));
}

}  // namespace shardproof
