// A piece is what a rank holds of a parameter, of its gradient or of its optimizer state.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

#include "shardproof/algebra/layout.h"

namespace shardproof {

// A run of one parameter's elements, in row-major order, that this rank holds, and the memory in which they lie.
struct Piece {
  std::string name;  // the parameter's name; a tied parameter's first name
  Shape shape;       // the shape of the whole parameter
  Interval run;      // the elements, numbered in row-major order; never empty
  at::Tensor data;   // 1-D with run.size() elements: the memory itself, not a copy
};

}  // namespace shardproof
