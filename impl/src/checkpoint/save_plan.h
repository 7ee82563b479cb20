// Which rank writes which boxes: every element once, spread evenly. No Torch.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "shardproof/algebra/plan.h"
#include "shardproof/base/dtypes.h"

namespace shardproof::checkpoint {

struct SavedTensor {
  Dtype dtype = Dtype::Float;
  Shape shape;
  Placement at;  // nothing partial
};

struct PlannedBox {
  std::string name;
  Box box;  // one of those that `owned` lists for the rank that writes it
};

// By rank; a rank's boxes by name, then ascending. A box that several ranks hold goes to the one with the fewest bytes so far,
// the largest first; a tensor without elements is one empty box of rank 0. A function of its arguments alone, so that every
// rank finds the same.
std::vector<std::vector<PlannedBox>> plan_save(const std::map<std::string, SavedTensor>& tensors, int64_t ranks);

}  // namespace shardproof::checkpoint
