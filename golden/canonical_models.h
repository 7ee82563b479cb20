// Forward and backward of an MLP and a GPT in canonical arithmetic, by hand.
#pragma once

#include <map>
#include <string>

#include "golden/golden.h"

namespace golden {

struct CanonicalPass {
  double loss = 0;                              // weighted
  std::map<std::string, at::Tensor> gradients;  // of every parameter, float64
};

// Parameters in any floating dtype.
CanonicalPass canonical_pass(const Model& model, const Named& parameters, const Microbatch& microbatch);

}  // namespace golden
