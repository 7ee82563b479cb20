// Forward and backward of an MLP, a GPT and a Llama in canonical arithmetic, by hand.
#pragma once

#include <map>
#include <string>

#include "golden/golden.h"
#include "golden/models.h"

namespace golden {

namespace exact {
class Store;
}

struct CanonicalPass {
  double loss = 0;                              // weighted
  std::map<std::string, at::Tensor> gradients;  // of every parameter, float64
};

// Parameters, and a rank's own buffers, in any floating dtype. The rest as in `loss` (models.h).
CanonicalPass canonical_pass(const Model& model, const Parameters& parameters, const Microbatch& microbatch,
                             bool training = true, Counts* counts = nullptr, const Counts* of_step = nullptr);

// The loss; gradients are added to the store.
double canonical_llama_pass(const Llama& llama, exact::Store& store, const Microbatch& data);

}  // namespace golden
