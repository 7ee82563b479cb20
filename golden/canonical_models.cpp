#include "golden/canonical_models.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <stdexcept>

#include "golden/canonical_math.h"

namespace golden {
namespace {

using namespace exact;

constexpr double kLayerNormEps = 1e-5;

Matrix matrix(const at::Tensor& tensor) {
  const at::Tensor values = tensor.to(at::kDouble).contiguous();
  const int64_t columns = values.dim() > 0 ? values.size(-1) : 1;
  Matrix m(columns > 0 ? values.numel() / columns : 0, columns);
  std::copy_n(values.const_data_ptr<double>(), values.numel(), m.values.begin());
  return m;
}

// Parameters and the gradients that were found, by name.
class Store {
 public:
  explicit Store(const Named& parameters) {
    for (const auto& [name, value] : parameters) parameters_[name] = matrix(value), sizes_[name] = value.sizes().vec();
  }
  bool has(const std::string& name) const { return parameters_.contains(name); }
  const Matrix& operator[](const std::string& name) const { return parameters_.at(name); }
  void add(const std::string& name, const Matrix& gradient) {
    Matrix& known = gradients_[name];
    known = known.rows > 0 ? known + gradient : gradient;
  }
  std::map<std::string, at::Tensor> gradients() const {
    std::map<std::string, at::Tensor> result;
    for (const auto& [name, sizes] : sizes_) {
      at::Tensor tensor = at::zeros(sizes, at::kDouble);
      const auto found = gradients_.find(name);
      if (found != gradients_.end())
        std::copy(found->second.values.begin(), found->second.values.end(), tensor.mutable_data_ptr<double>());
      result[name] = tensor;
    }
    return result;
  }

  Matrix linear(const std::string& name, const Matrix& x) const {
    return exact::linear(x, parameters_.at(name + ".weight"), has(name + ".bias") ? parameters_.at(name + ".bias") : Matrix());
  }
  Matrix linear_backward(const std::string& name, const Matrix& x, const Matrix& dy) {
    const LinearGradients g = exact::linear_backward(x, parameters_.at(name + ".weight"), dy);
    return keep(name, g);
  }
  Matrix norm(const std::string& name, const Matrix& x) const {
    return layer_norm(x, parameters_.at(name + ".weight"), parameters_.at(name + ".bias"), kLayerNormEps);
  }
  Matrix norm_backward(const std::string& name, const Matrix& x, const Matrix& dy) {
    return keep(name, layer_norm_backward(x, parameters_.at(name + ".weight"), dy, kLayerNormEps));
  }

 private:
  Matrix keep(const std::string& name, const LinearGradients& g) {
    add(name + ".weight", g.weight);
    if (has(name + ".bias")) add(name + ".bias", g.bias);
    return g.x;
  }

  std::map<std::string, Matrix> parameters_, gradients_;
  std::map<std::string, std::vector<int64_t>> sizes_;
};

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

// Rows [B * T, hidden], sample by sample.
struct Block {
  Matrix x, normed, qkv, mixed, middle, normed_again, wide;
};

Matrix by_sample(const Matrix& rows, int64_t samples, int64_t columns, const std::function<Matrix(const Matrix&, int64_t)>& f) {
  Matrix result(rows.rows, columns);
  const int64_t length = rows.rows / samples;
  for (int64_t s = 0; s < samples; ++s) {
    Matrix one(length, rows.columns);
    std::copy_n(rows.values.begin() + s * length * rows.columns, one.values.size(), one.values.begin());
    const Matrix given = f(one, s);
    std::copy(given.values.begin(), given.values.end(), result.values.begin() + s * length * columns);
  }
  return result;
}

Matrix slice_rows(const Matrix& m, int64_t begin, int64_t count) {
  Matrix result(count, m.columns);
  std::copy_n(m.values.begin() + begin * m.columns, result.values.size(), result.values.begin());
  return result;
}

Matrix block_forward(const Gpt& gpt, const Store& store, const std::string& name, int64_t samples, Block& b) {
  b.normed = store.norm(name + "ln_1", b.x);
  b.qkv = store.linear(name + "attn.c_attn", b.normed);
  b.mixed = by_sample(b.qkv, samples, gpt.hidden, [&](const Matrix& one, int64_t) { return attention(one, gpt.heads); });
  b.middle = b.x + store.linear(name + "attn.c_proj", b.mixed);
  b.normed_again = store.norm(name + "ln_2", b.middle);
  b.wide = store.linear(name + "mlp.c_fc", b.normed_again);
  return b.middle + store.linear(name + "mlp.c_proj", curve(b.wide, Curve::gelu));
}

Matrix block_backward(const Gpt& gpt, Store& store, const std::string& name, int64_t samples, const Block& b,
                      const Matrix& dy) {
  const Matrix d_curved = store.linear_backward(name + "mlp.c_proj", curve(b.wide, Curve::gelu), dy);
  const Matrix d_wide = curve_backward(b.wide, d_curved, Curve::gelu);
  const Matrix d_normed = store.linear_backward(name + "mlp.c_fc", b.normed_again, d_wide);
  const Matrix d_middle = dy + store.norm_backward(name + "ln_2", b.middle, d_normed);
  const Matrix d_mixed = store.linear_backward(name + "attn.c_proj", b.mixed, d_middle);
  const int64_t length = b.x.rows / samples;
  const Matrix d_qkv = by_sample(b.qkv, samples, 3 * gpt.hidden, [&](const Matrix& one, int64_t s) {
    return attention_backward(one, gpt.heads, slice_rows(d_mixed, s * length, length));
  });
  return d_middle + store.norm_backward(name + "ln_1", b.x, store.linear_backward(name + "attn.c_attn", b.normed, d_qkv));
}

// The loss, and its weighted gradient in place of the logits.
double token_loss(Matrix& logits, const int64_t* targets, double weight) {
  Sum loss;
  for (int64_t i = 0; i < logits.rows; ++i) {
    double most = logits.at(i, 0);
    for (int64_t j = 1; j < logits.columns; ++j) most = std::max(most, logits.at(i, j));
    Sum powers;
    for (int64_t j = 0; j < logits.columns; ++j) powers.add(std::exp(logits.at(i, j) - most));
    const double sum = powers.value();
    loss.add(std::log(sum) - rounded(logits.at(i, targets[i]) - most));
    for (int64_t j = 0; j < logits.columns; ++j)
      logits.at(i, j) = rounded(weight * (std::exp(logits.at(i, j) - most) / sum - (j == targets[i] ? 1 : 0)));
  }
  return loss.value() * weight;
}

void embedding_backward(Store& store, const std::string& name, const std::vector<int64_t>& rows, const Matrix& dy) {
  const Matrix& weight = store[name];
  std::vector<Sum> sums(weight.values.size());
  for (int64_t i = 0; i < dy.rows; ++i)
    for (int64_t j = 0; j < dy.columns; ++j)
      sums[static_cast<size_t>(rows[static_cast<size_t>(i)] * dy.columns + j)].add(dy.at(i, j));
  Matrix gradient(weight.rows, weight.columns);
  for (size_t i = 0; i < sums.size(); ++i) gradient.values[i] = sums[i].value();
  store.add(name, gradient);
}

double gpt_pass(const Gpt& gpt, Store& store, const Microbatch& data) {
  const at::Tensor input = data.input.contiguous(), target = data.target.contiguous();
  const int64_t samples = input.size(0), length = input.size(1), tokens = input.numel();
  std::vector<int64_t> words(input.const_data_ptr<int64_t>(), input.const_data_ptr<int64_t>() + tokens), positions;
  Matrix x(tokens, gpt.hidden);
  for (int64_t i = 0; i < tokens; ++i) {
    positions.push_back(i % length);
    for (int64_t j = 0; j < gpt.hidden; ++j)
      x.at(i, j) =
          rounded(store["wte.weight"].at(words[static_cast<size_t>(i)], j)) + rounded(store["wpe.weight"].at(i % length, j));
  }
  std::vector<Block> blocks(static_cast<size_t>(gpt.layers));
  for (int64_t l = 0; l < gpt.layers; ++l) {
    Block& block = blocks[static_cast<size_t>(l)];
    block.x = x;
    x = block_forward(gpt, store, fmt::format("h.{}.", l), samples, block);
  }
  const std::string head = gpt.tied ? "wte.weight" : "lm_head.weight";
  const Matrix normed = store.norm("ln_f", x);
  Matrix logits = linear(normed, store[head], {});
  const double loss = token_loss(logits, target.const_data_ptr<int64_t>(), data.weight);
  const LinearGradients g = linear_backward(normed, store[head], logits);
  store.add(head, g.weight);
  Matrix d = store.norm_backward("ln_f", x, g.x);
  for (int64_t l = gpt.layers; l-- > 0;)
    d = block_backward(gpt, store, fmt::format("h.{}.", l), samples, blocks[static_cast<size_t>(l)], d);
  embedding_backward(store, "wte.weight", words, d);
  embedding_backward(store, "wpe.weight", positions, d);
  return loss;
}

}  // namespace

CanonicalPass canonical_pass(const Model& model, const Named& parameters, const Microbatch& microbatch) {
  Store store(parameters);
  double loss = 0;
  switch (model.kind) {
    case Model::Kind::mlp:
      loss = mlp_pass(model.mlp, store, microbatch);
      break;
    case Model::Kind::gpt:
      loss = gpt_pass(model.gpt, store, microbatch);
      break;
    default:
      throw std::invalid_argument("golden: canonical arithmetic is of an mlp or a gpt");
  }
  return {loss, store.gradients()};
}

}  // namespace golden
