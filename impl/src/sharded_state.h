// What a `Sharded` is made of.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "schedule.h"
#include "shardproof/fully_shard.h"

namespace shardproof {

class ShardedState {
 public:
  // Builds the units; see fully_shard.
  ShardedState(std::shared_ptr<torch::nn::Module> module, std::shared_ptr<MeshComm> comms, ShardOptions options);
  ~ShardedState();

  MeshComm& comms() { return *comms_; }
  const ShardOptions& options() const { return options_; }
  Schedule& schedule() { return schedule_; }
  // Every name of a parameter and, for the ones that share a tensor, the name under which it is sharded.
  const std::vector<std::pair<std::string, std::string>>& aliases() const { return aliases_; }

 private:
  std::shared_ptr<torch::nn::Module> module_;
  std::shared_ptr<MeshComm> comms_;
  ShardOptions options_;
  std::vector<std::pair<std::string, std::string>> aliases_;
  std::vector<std::shared_ptr<torch::nn::Module>> attached_;
  Schedule schedule_;
};

}  // namespace shardproof
