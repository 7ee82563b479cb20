#include <ATen/ATen.h>

#include "shardproof/base/check.h"
#include "shardproof/hooks/unit.h"
#include "shardproof/models/models.h"
#include "shardproof/nn/gradient_place.h"

namespace shardproof {
namespace {

at::Tensor activate_canonically(const at::Tensor& x, Activation activation) {
  switch (activation) {
    case Activation::identity:
      return x;
    case Activation::relu:
      return canonical_ops::relu(x);
    case Activation::tanh:
      return canonical_ops::tanh(x);
    case Activation::gelu:
      return canonical_ops::gelu(x);
  }
  throw BrokenInvariant("[mlp] unknown activation");
}

at::Tensor activate(const at::Tensor& x, Activation activation) {
  switch (activation) {
    case Activation::identity: return x;
    case Activation::relu: return at::relu(x);
    case Activation::tanh: return at::tanh(x);
    case Activation::gelu: return at::gelu(x);
  }
  throw BrokenInvariant("[mlp] unknown activation");
}

}  // namespace

at::Tensor LinearImpl::forward(const at::Tensor& input) {
  if (is_canonical()) return canonical_ops::linear(input, weight, bias, canonical_name());
  return direct::linear(input, weight, bias);
}

at::Tensor LayerNormImpl::forward(const at::Tensor& input) {
  if (is_canonical()) return canonical_ops::layer_norm(input, weight, bias, options.eps(), canonical_name());
  return torch::nn::LayerNormImpl::forward(input);
}

at::Tensor EmbeddingImpl::forward(const at::Tensor& tokens) {
  if (is_canonical()) return canonical_ops::embedding(weight, tokens, canonical_name());
  const bool is_plain = !options.max_norm() && !options.sparse() && !options.scale_grad_by_freq();
  if (!is_plain) return torch::nn::EmbeddingImpl::forward(tokens);
  return direct::embedding(weight, tokens, options.padding_idx().value_or(-1));
}

MlpImpl::MlpImpl(MlpOptions options) : options_(std::move(options)) {
  const std::vector<int64_t>& widths = options_.widths;
  SHARD_REQUIRE(widths.size() >= 2, "mlp", "needs at least two widths (input and output), got {}", widths.size());
  // The intermediate module only spells the names "layers.<i>".
  auto layers = register_module("layers", std::make_shared<torch::nn::Module>("layers"));
  for (size_t i = 0; i + 1 < widths.size(); ++i) {
    SHARD_REQUIRE(widths[i] > 0 && widths[i + 1] > 0, "mlp", "widths must be positive, layer {} is {} -> {}", i, widths[i],
                  widths[i + 1]);
    layers_.push_back(layers->register_module(
        std::to_string(i),
        Linear(torch::nn::LinearOptions(widths[i], widths[i + 1]).bias(options_.bias))));
  }
}

at::Tensor MlpImpl::forward(at::Tensor input) {
  at::Tensor x = std::move(input);
  for (size_t i = 0; i < layers_.size(); ++i) {
    x = call(layers_[i], x);
    if (i + 1 < layers_.size())
      x = is_canonical() ? activate_canonically(x, options_.activation) : activate(x, options_.activation);
  }
  return x;
}

}  // namespace shardproof
