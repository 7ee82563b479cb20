// The models of the transformers package, run by embedded Python on given weights.
#pragma once

#include <string>

#include "golden/golden.h"

namespace golden {

struct PeerRun {
  std::string config;                 // the text of the model's config.json
  // Of GPT-2 without "transformer." before the names; matrices are outputs x inputs. With the biases of routers, where the
  // model has some.
  Named parameters;
  at::Tensor tokens, targets;         // int64 [B, T]
  at::ScalarType dtype = at::kFloat;  // or double, bfloat16 or float16
};

struct PeerResult {
  at::Tensor logits;  // these and gradients as float64
  Named gradients;    // of the sum over tokens of the cross entropy, as the parameters are given, without biases of routers
};

// Throws EnvironmentError as train_in_python does, or without the package, and std::runtime_error with Python's words, e.g.
// when the package's parameters have other names than those given.
PeerResult run_in_transformers(const PeerRun& run);

}  // namespace golden
