// Which rank writes which boxes: every element once, spread evenly. No Torch.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "shardproof/algebra/plan.h"
#include "shardproof/base/dtypes.h"

namespace shardproof::checkpoint {

struct SavedTensor {
  Dtype dtype = Dtype::Float;
  Shape shape;
  Placement at;  // nothing partial
  bool of_rank_0 = false;  // each rank has a whole one of its own, not a copy: that of rank 0 is saved
  bool operator==(const SavedTensor&) const = default;
};

struct PlannedBox {
  std::string name;
  Box box;  // one of those that `owned` lists for the rank that writes it
};

// By rank; a rank's boxes by name, then ascending. A box that several ranks hold as copies goes to the one with the fewest
// bytes so far, the largest first; a tensor without elements is one empty box of rank 0. A function of its arguments alone, so
// that every rank finds the same.
std::vector<std::vector<PlannedBox>> plan_save(const std::map<std::string, SavedTensor>& tensors, int64_t ranks);

// All that a save works out before it has seen a value, and what it was made of. The next save may use it as long as that is
// the same.
struct SavePlan {
  std::map<std::string, SavedTensor> tensors;
  int64_t ranks = 0, rank = 0;
  std::vector<std::vector<PlannedBox>> boxes;  // by rank
  std::vector<int64_t> begins;  // where the boxes of `rank` begin in what it holds of their tensors
  std::vector<std::vector<uint64_t>> lengths;  // of the entries of `boxes`, on rank 0, which alone writes .metadata
};
std::shared_ptr<const SavePlan> make_save_plan(std::map<std::string, SavedTensor> tensors, int64_t ranks, int64_t rank);

}  // namespace shardproof::checkpoint
