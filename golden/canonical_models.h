// Forward and backward of an MLP, a GPT and a Llama in canonical arithmetic, by hand.
#pragma once

#include <map>
#include <string>

#include "golden/golden.h"

namespace golden {

namespace exact {
class Store;
}

struct CanonicalPass {
  double loss = 0;                              // weighted
  std::map<std::string, at::Tensor> gradients;  // of every parameter, float64
};

// Parameters in any floating dtype.
CanonicalPass canonical_pass(const Model& model, const Named& parameters, const Microbatch& microbatch);

// The loss; gradients are added to the store.
double canonical_llama_pass(const Llama& llama, exact::Store& store, const Microbatch& data);

}  // namespace golden
