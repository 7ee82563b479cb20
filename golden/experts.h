// The MLPs of a llama's layers: the plain gated one, and the mixture of experts (golden.h has its formulas).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "golden/models.h"

namespace golden {

// down(silu(gate(x)) * up(x)), the linear layers prefix + "gate_proj" and so on.
at::Tensor gated_mlp(Forward& forward, const std::string& prefix, const at::Tensor& x);

bool has_experts(const Llama& llama, int64_t layer);
// With which "e_score_correction_bias" begins: float32.
at::Tensor initial_bias(const Llama& llama);

// Of tokens, both [N, experts_per_token]: which experts each has, and how much they weigh, in the dtype of the logits.
struct Routes {
  at::Tensor experts;
  at::Tensor weights;
};
// `logits` [N, experts], float32 or float64; `bias` [experts], or undefined.
Routes routes_of(const Llama& llama, const at::Tensor& logits, const at::Tensor& bias = {});

// Of choices of sequences of `length` tokens, token by token: those that expert_capacity drops. `weights` are not rounded.
std::vector<bool> dropped_choices(const Llama& llama, int64_t length, const std::vector<int64_t>& experts,
                                  const std::vector<double>& weights);

// Of the parameters below the prefix: x [B, T, hidden] -> [B, T, hidden].
at::Tensor mixture(const Llama& llama, Forward& forward, const std::string& prefix, const at::Tensor& x);
Shapes mixture_shapes(const Llama& llama, const std::string& prefix);

}  // namespace golden
