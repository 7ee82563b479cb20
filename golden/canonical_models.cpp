#include "golden/canonical_models.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <stdexcept>

#include "golden/canonical_store.h"

namespace golden {
namespace {

using namespace exact;

double mlp_pass(const Mlp& mlp, Store& store, const Microbatch& data) {
  const Curve kind = static_cast<Curve>(mlp.activation);
  const size_t layers = mlp.widths.size() - 1;
  std::vector<Matrix> inputs{matrix(data.input)}, outputs;
  for (size_t i = 0; i < layers; ++i) {
    outputs.push_back(store.linear(fmt::format("layers.{}", i), inputs[i]));
    if (i + 1 < layers) inputs.push_back(curve(outputs[i], kind));
  }
  const Matrix target = matrix(data.target);
  Matrix d = outputs.back();
  Sum loss;
  for (size_t i = 0; i < d.values.size(); ++i) {
    const double error = d.values[i] - rounded(target.values[i]);
    loss.add(error * error);
    d.values[i] = rounded(2 * data.weight * error);
  }
  for (size_t i = layers; i-- > 0;) {
    d = store.linear_backward(fmt::format("layers.{}", i), inputs[i], d);
    if (i > 0) d = curve_backward(outputs[i - 1], d, kind);
  }
  return loss.value() * data.weight;
}

// Columns of queries, keys and values beside each other.
Matrix third(const Matrix& qkv, int64_t index) {
  Matrix part(qkv.rows, qkv.columns / 3);
  for (int64_t i = 0; i < part.rows; ++i)
    for (int64_t j = 0; j < part.columns; ++j) part.at(i, j) = qkv.at(i, index * part.columns + j);
  return part;
}

Matrix joined(const AttentionGradients& g) {
  Matrix qkv(g.q.rows, 3 * g.q.columns);
  for (int64_t i = 0; i < g.q.rows; ++i)
    for (int64_t j = 0; j < g.q.columns; ++j) {
      qkv.at(i, j) = g.q.at(i, j);
      qkv.at(i, g.q.columns + j) = g.k.at(i, j);
      qkv.at(i, 2 * g.q.columns + j) = g.v.at(i, j);
    }
  return qkv;
}

class GptBlock {
 public:
  GptBlock(const Gpt& gpt, Store& store, int64_t index) : gpt_(gpt), store_(store), name_(fmt::format("h.{}.", index)) {}

  Matrix forward(const Matrix& x, const Tokens& tokens, Dropout& dropout) {
    x_ = x;
    normed_ = store_.layer_norm(name_ + "ln_1", x);
    const Matrix qkv = store_.linear(name_ + "attn.c_attn", normed_);
    attention_ = BatchAttention(tokens, {third(qkv, 0), third(qkv, 1), third(qkv, 2), gpt_.heads, gpt_.heads,
                                         dropout.mask(tokens.samples * gpt_.heads * tokens.length * tokens.length)});
    mixed_ = attention_.forward();
    const auto elements = static_cast<int64_t>(x.values.size());
    const Matrix projected = store_.linear(name_ + "attn.c_proj", mixed_);
    attn_mask_ = dropout.mask(elements);
    middle_ = x + times(projected, attn_mask_);
    normed_again_ = store_.layer_norm(name_ + "ln_2", middle_);
    wide_ = store_.linear(name_ + "mlp.c_fc", normed_again_);
    const Matrix narrow = store_.linear(name_ + "mlp.c_proj", curve(wide_, Curve::gelu));
    mlp_mask_ = dropout.mask(elements);
    return middle_ + times(narrow, mlp_mask_);
  }

  Matrix backward(const Matrix& dy) {
    const Matrix d_curved = store_.linear_backward(name_ + "mlp.c_proj", curve(wide_, Curve::gelu), times(dy, mlp_mask_));
    const Matrix d_wide = curve_backward(wide_, d_curved, Curve::gelu);
    const Matrix d_normed = store_.linear_backward(name_ + "mlp.c_fc", normed_again_, d_wide);
    const Matrix d_middle = dy + store_.layer_norm_backward(name_ + "ln_2", middle_, d_normed);
    const Matrix d_mixed = store_.linear_backward(name_ + "attn.c_proj", mixed_, times(d_middle, attn_mask_));
    const Matrix d_first = store_.linear_backward(name_ + "attn.c_attn", normed_, joined(attention_.backward(d_mixed)));
    return d_middle + store_.layer_norm_backward(name_ + "ln_1", x_, d_first);
  }

 private:
  const Gpt& gpt_;
  Store& store_;
  std::string name_;
  Matrix x_, normed_, mixed_, middle_, normed_again_, wide_;
  BatchAttention attention_;
  std::vector<double> attn_mask_, mlp_mask_;
};

double gpt_pass(const Gpt& gpt, Store& store, const Microbatch& data) {
  const Tokens tokens(data);
  Dropout& dropout = store.dropout;
  std::vector<int64_t> positions;
  Matrix x(std::ssize(tokens.words), gpt.hidden);
  for (int64_t i = 0; i < x.rows; ++i) {
    positions.push_back(i % tokens.length);
    for (int64_t j = 0; j < gpt.hidden; ++j)
      x.at(i, j) = rounded(store["wte.weight"].at(tokens.words[static_cast<size_t>(i)], j)) +
                   rounded(store["wpe.weight"].at(i % tokens.length, j));
  }
  const std::vector<double> mask = dropout.mask(static_cast<int64_t>(x.values.size()));
  x = times(x, mask);
  std::vector<GptBlock> blocks;
  for (int64_t l = 0; l < gpt.layers; ++l) x = blocks.emplace_back(gpt, store, l).forward(x, tokens, dropout);
  const Matrix normed = store.layer_norm("ln_f", x);
  double loss = 0;
  Matrix d =
      store.layer_norm_backward("ln_f", x, head_pass(gpt.tied ? "wte.weight" : "", store, normed, tokens, data.weight, loss));
  for (int64_t l = gpt.layers; l-- > 0;) d = blocks[static_cast<size_t>(l)].backward(d);
  d = times(d, mask);
  store.embedding_backward("wte.weight", tokens.words, d);
  store.embedding_backward("wpe.weight", positions, d);
  return loss;
}

}  // namespace

CanonicalPass canonical_pass(const Model& model, const Parameters& parameters, const Microbatch& microbatch, bool training,
                             Counts* counts, const Counts* of_step) {
  Store store(parameters, model, microbatch.dropout_seed);
  store.routers = {.training = training, .weight = microbatch.weight, .of_step = of_step};
  double loss = 0;
  switch (model.kind) {
    case Model::Kind::mlp:
      loss = mlp_pass(model.mlp, store, microbatch);
      break;
    case Model::Kind::gpt:
      loss = gpt_pass(model.gpt, store, microbatch);
      break;
    case Model::Kind::llama:
      loss = canonical_llama_pass(model.llama, store, microbatch);
      break;
    default:
      throw std::invalid_argument("golden: canonical arithmetic is of an mlp, a gpt or a llama");
  }
  for (const auto& [name, own] : store.routers.counts)
    if (counts) (*counts)[name] = counts->contains(name) ? counts->at(name) + own : own;
  return {loss, store.gradients()};
}

}  // namespace golden
