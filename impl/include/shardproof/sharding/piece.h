// Pieces and shards are what a rank holds of a parameter, of its gradient or of its optimizer state; placements are what all
// ranks hold.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

#include "shardproof/algebra/plan.h"

namespace shardproof {

// A run of one parameter's elements, in row-major order, that this rank holds, and the memory in which they lie.
struct Piece {
  std::string name;  // the parameter's name; a tied parameter's first name
  Shape shape;       // the shape of the whole parameter
  Interval run;      // the elements, numbered in row-major order; never empty
  at::Tensor data;   // 1-D with run.size() elements: the memory itself; a copy only of parameters (not main parameters) that
                     // are cut by rows, of which the strategy keeps more than it updates, but not all (hfsdp)
};

// What this rank holds of one tensor, in the storage order of its layout: the elements that `owned_runs` lists.
struct Shard {
  std::string name;
  Shape shape;  // of the whole tensor
  Placement at;
  at::Tensor data;  // 1-D, the live memory, or a copy as in a Piece; without elements where this rank holds nothing
};

// Appends the runs of a shard; `rank` is this one.
void append_pieces(const Shard& shard, int64_t rank, std::vector<Piece>& pieces);

// Which rank holds which elements of a parameter: integers, known to every rank and the same on all of them. Law: a rank's
// pieces are what `owned_runs` says of its placements.
struct ParameterPlacement {
  Shape shape;                                             // of the whole parameter
  at::ScalarType compute = at::kFloat, main = at::kFloat;  // dtypes
  Placement parameter;                                     // of the parameter between steps, in the compute dtype
  Placement state;  // of the main parameter, of its gradient after the last backward and of the optimizer's state
};

}  // namespace shardproof
