// What a rank counts of a step besides its loss: sums over all elements of the sharded model, each counted once.
#pragma once

#include <cstdint>
#include <map>
#include <set>
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
  // By parameter, where the runs begin that no lower rank holds as well.
  using Own = std::map<std::string, std::set<int64_t>>;
  static bool counts(const Own& own, const shardproof::Piece& piece);

  Own parameters_, gradients_;
  int64_t zeros_ = 0;
};

}  // namespace harness
