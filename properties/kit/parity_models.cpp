#include "properties/kit/parity_models.h"

namespace parity {

namespace {

// Under MetaInit there is nothing to fill.
void initialize(torch::nn::Module& module) {
  if (!module.parameters().empty() && module.parameters()[0].is_meta()) return;
  shardproof::initialize_parameters(module, 5, 0.5);
}

}  // namespace

torch::nn::Sequential stack(const std::vector<int64_t>& widths) {
  torch::nn::Sequential model;
  for (size_t i = 0; i + 1 < widths.size(); ++i) {
    if (i > 0) model->push_back(torch::nn::Tanh());
    model->push_back(torch::nn::Linear(widths[i], widths[i + 1]));
  }
  initialize(*model);
  return model;
}

WeightOnlyImpl::WeightOnlyImpl() {
  weight = register_parameter("weight", toy::data({4, 4}, 1));
}

ChunkedHeadImpl::ChunkedHeadImpl(bool tied) {
  embed = register_module("embed", torch::nn::Embedding(kVocabulary, kWidth));
  body = register_module("body", torch::nn::Linear(torch::nn::LinearOptions(kWidth, kWidth).bias(false)));
  norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
  head = register_module("head", Projection(tied ? embed->weight : at::zeros({kVocabulary, kWidth})));
  initialize(*this);
}

at::Tensor ChunkedHeadImpl::hidden(at::Tensor tokens) {
  return shardproof::call(norm, shardproof::call(body, shardproof::call(embed, std::move(tokens))));
}

at::Tensor tokens(int64_t salt) {
  at::Tensor ids = at::empty({4, 3}, at::kLong);
  for (int64_t i = 0; i < ids.numel(); ++i) ids.mutable_data_ptr<int64_t>()[i] = (i * 7 + salt * 5) % kVocabulary;
  return ids;
}

TiedImpl::TiedImpl(int64_t vocabulary, int64_t width) {
  embed = register_module("embed", torch::nn::Embedding(vocabulary, width));
  head = register_module("head", Projection(embed->weight));
  initialize(*this);
}

at::Tensor TiedImpl::forward(at::Tensor tokens) {
  return shardproof::call(head, shardproof::call(embed, std::move(tokens)));
}

DoubleLinearImpl::DoubleLinearImpl(bool run_second) : run_second_(run_second) {
  lin1 = register_module("lin1", torch::nn::Linear(5, 5));
  lin2 = register_module("lin2", torch::nn::Linear(5, 5));
  initialize(*this);
}

std::pair<at::Tensor, at::Tensor> DoubleLinearImpl::forward(at::Tensor x) {
  at::Tensor first = at::tanh(shardproof::call(lin1, x));
  return {first, run_second_ ? at::tanh(shardproof::call(lin2, x)) : first};
}

BlockImpl::BlockImpl(int64_t width) {
  inner = register_module("inner", torch::nn::Linear(width, width));
  outer = register_module("outer", torch::nn::Linear(width, width));
  initialize(*this);
}

torch::nn::Sequential blocks(int64_t count, int64_t width) {
  torch::nn::Sequential model;
  for (int64_t i = 0; i < count; ++i) model->push_back(Block(width));
  initialize(*model);
  return model;
}

}  // namespace parity
