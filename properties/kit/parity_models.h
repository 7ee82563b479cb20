// The models of the peers' tests, small.
#pragma once

#include <ATen/ATen.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <string>
#include <utility>
#include <vector>

#include "properties/kit/toy_modules.h"
#include "shardproof/shardproof.h"

namespace parity {

// Linear modules of these widths with tanh between them: "0", "1" (tanh), "2", ...
torch::nn::Sequential stack(const std::vector<int64_t>& widths);

// A parameter and a forward without inputs.
class WeightOnlyImpl : public torch::nn::Module {
 public:
  WeightOnlyImpl();
  at::Tensor forward() { return at::mm(weight, weight); }
  at::Tensor weight;
};
TORCH_MODULE(WeightOnly);

// Without a bias; the weight may belong to another module too.
class ProjectionImpl : public torch::nn::Module {
 public:
  explicit ProjectionImpl(at::Tensor shared) { weight = register_parameter("weight", std::move(shared)); }
  at::Tensor forward(at::Tensor x) { return at::linear(x, weight); }
  at::Tensor weight;
};
TORCH_MODULE(Projection);

// embed -> body -> norm -> head, where the head may be left to be called later, by itself.
class ChunkedHeadImpl : public torch::nn::Module {
 public:
  explicit ChunkedHeadImpl(bool tied = false);
  at::Tensor hidden(at::Tensor tokens);
  at::Tensor forward(at::Tensor tokens) { return hidden(std::move(tokens)); }
  torch::nn::Embedding embed{nullptr};
  torch::nn::Linear body{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  Projection head{nullptr};
};
TORCH_MODULE(ChunkedHead);
constexpr int64_t kVocabulary = 11, kWidth = 6;
at::Tensor tokens(int64_t salt);

// An embedding and a projection with one weight.
class TiedImpl : public torch::nn::Module {
 public:
  TiedImpl(int64_t vocabulary, int64_t width);
  at::Tensor forward(at::Tensor tokens);
  torch::nn::Embedding embed{nullptr};
  Projection head{nullptr};
};
TORCH_MODULE(Tied);

// Two linear modules side by side; the second may be left out of the forward.
class DoubleLinearImpl : public torch::nn::Module {
 public:
  explicit DoubleLinearImpl(bool run_second);
  std::pair<at::Tensor, at::Tensor> forward(at::Tensor x);
  torch::nn::Linear lin1{nullptr}, lin2{nullptr};

 private:
  bool run_second_;
};
TORCH_MODULE(DoubleLinear);

// tanh(linear(x)) of a block within a block.
class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(int64_t width);
  at::Tensor forward(at::Tensor x) { return x + shardproof::call(outer, at::tanh(shardproof::call(inner, x))); }
  torch::nn::Linear inner{nullptr}, outer{nullptr};
};
TORCH_MODULE(Block);
// `count` blocks, one after the other: "0", "1", ...
torch::nn::Sequential blocks(int64_t count, int64_t width);

// Every Block a unit of its own.
inline shardproof::ShardOptions block_units(const std::string& strategy) {
  shardproof::ShardOptions options = toy::options(strategy);
  options.units = shardproof::by_type<BlockImpl>();
  return options;
}

}  // namespace parity
