// What a rank holds of a parameter, of its gradient or of its optimizer state.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "shardproof/algebra/layout.h"

namespace shardproof {

// A run of one parameter's row-major elements that this rank holds, and where they are.
struct Piece {
  std::string name;  // of the parameter; of a tied one, its first name
  Shape shape;       // of the whole parameter
  Interval run;      // in the row-major numbering of its elements; never empty
  at::Tensor data;   // 1-D, run.size() elements, the live memory
};

}  // namespace shardproof
