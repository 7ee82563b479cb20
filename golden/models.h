// The models as plain functions of their parameters. The sequence of LibTorch calls is part of the contract:
// a model that makes the same calls on the same shapes has the same bits.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "golden/dropout.h"
#include "golden/golden.h"

namespace golden {

// Parameters by name, as `parameter_shapes` names them.
using Parameters = std::map<std::string, at::Tensor>;

using Shapes = std::vector<std::pair<std::string, std::vector<int64_t>>>;
Shapes llama_shapes(const Llama& llama);

// How often each expert of a layer was chosen, by the name that its bias has or would have: float64 [experts].
using Counts = std::map<std::string, at::Tensor>;

// What one forward consists of.
struct Forward {
  const Parameters& parameters;
  const Adapters& adapters;
  Dropout dropout;
  bool training = true;
  const Counts* of_step = nullptr;  // what a step's forwards choose, where a balance is over those
  at::Tensor auxiliary = {};  // the sum of the layers' own losses; undefined where there are none
  Counts counts = {};

  // The linear layer of that name, with a bias and with an adapter where there are such parameters. `in_float32`: its product,
  // without the adapter, is taken in float32, or wider where x is wider.
  at::Tensor linear(const at::Tensor& x, const std::string& name, bool in_float32 = false);
};

// input [B, widths.front()] -> [B, widths.back()]
at::Tensor mlp_forward(const Mlp& mlp, Forward& forward, const at::Tensor& input);

// tokens [B, T] int64 -> logits [B, T, vocab]
at::Tensor gpt_forward(const Gpt& gpt, Forward& forward, const at::Tensor& tokens);
at::Tensor llama_forward(const Llama& llama, Forward& forward, const at::Tensor& tokens);

// input [B, channels.front(), size, size] -> [B, classes]. Statistics of a batch norm are among `parameters`. Where it is
// training they are not used, and moved in place.
at::Tensor conv_forward(const Conv& conv, const Parameters& parameters, const at::Tensor& input, bool training);

// input [B, width] -> [B, width]; `branch`: Microbatch::branch
at::Tensor odd_forward(const Odd& odd, const Parameters& parameters, const at::Tensor& input, bool branch);

// What a rank's buffers of its own begin with, in the order of their names.
Named initial_buffers(const Model& model, at::ScalarType dtype);

// weight * the model's loss, 0-dim, float32 or float64: forward, sum, then one multiplication. `parameters` has a rank's own
// buffers, too. Adds what the forward chose to `counts`. `of_step`: see Forward.
at::Tensor loss(const Model& model, const Parameters& parameters, const Microbatch& microbatch, bool training = true,
                Counts* counts = nullptr, const Counts* of_step = nullptr);

}  // namespace golden
