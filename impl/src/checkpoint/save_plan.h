// Which rank writes which boxes: every element once, spread evenly. No Torch.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "shardproof/algebra/layout.h"
#include "shardproof/base/dtypes.h"

namespace shardproof::checkpoint {

// Part of a tensor that a rank holds: a run of its row-major elements.
struct HeldRun {
  int64_t rank = 0;
  Interval run;
};

struct HeldTensor {
  Dtype dtype = Dtype::Float;
  Shape sizes;
  std::vector<HeldRun> held;
};

// A box, and the runs that make up its elements, in that order. Most have one run; parts of the rows of a matrix have one
// a row.
struct PlannedBox {
  std::string name;
  Box box;
  std::vector<Interval> runs;
};

// By rank, then by name. Runs that several ranks hold go to the one with the fewest bytes so far, the largest first; a tensor
// without elements is one empty box of rank 0. A function of its arguments alone, so that every rank finds the same. Throws
// Error naming the tensor when an element is held by nobody.
std::vector<std::vector<PlannedBox>> plan_save(const std::map<std::string, HeldTensor>& tensors, int64_t ranks);

// Runs of one tensor of these sizes, ascending, as few boxes as they fit in without being reordered.
std::vector<PlannedBox> boxes_of(const std::string& name, const Shape& sizes, const std::vector<Interval>& runs);

}  // namespace shardproof::checkpoint
