// What a rank counts of a step besides its loss: sums over all elements of the sharded model, each counted once.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "shardproof/comm/comm.h"
#include "shardproof/sharding/fully_shard.h"

namespace harness {

class TrainMeasures {
 public:
  explicit TrainMeasures(const shardproof::Sharded& sharded);

  // Counts the final gradients, which the optimizer's step drops.
  void count_gradients(const shardproof::Sharded& sharded);

  struct Result {
    double parameter_norm = 0;   // of main parameters
    int64_t zero_gradients = 0;  // how many elements of the gradients are zero
    bool stop = false;           // whether any rank wants to
  };
  // Of the parameters as they are now, and of the gradients as they were counted. One collective over the world.
  Result measure(const shardproof::Sharded& sharded, bool stop, shardproof::Comm& world) const;

 private:
  template <class Visit>
  void each_first_copy(const std::vector<shardproof::Piece>& pieces, const Visit& visit) const;

  std::map<std::string, std::vector<shardproof::Interval>> first_copies_;  // by parameter, of what this rank has of it
  int64_t zeros_ = 0;
};

}  // namespace harness
