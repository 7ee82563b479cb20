#include "golden/canonical_store.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "golden/curves.h"

namespace golden::exact {
namespace {

std::vector<int64_t> values_of(const at::Tensor& tensor) {
  const at::Tensor whole = tensor.contiguous();
  return {whole.const_data_ptr<int64_t>(), whole.const_data_ptr<int64_t>() + whole.numel()};
}

Matrix rows_of(const Matrix& m, int64_t begin, int64_t count) {
  Matrix result(count, m.columns);
  std::copy_n(m.values.begin() + begin * m.columns, result.values.size(), result.values.begin());
  return result;
}

Matrix scaled(Matrix m, double factor) {
  for (double& value : m.values) value *= factor;
  return m;
}

void append(Matrix& whole, const Matrix& rows) {
  whole.rows += rows.rows;
  whole.columns = rows.columns;
  whole.values.insert(whole.values.end(), rows.values.begin(), rows.values.end());
}

}  // namespace

Matrix matrix(const at::Tensor& tensor) {
  const at::Tensor values = tensor.to(at::kCPU, at::kDouble).contiguous();
  const int64_t columns = values.dim() > 0 ? values.size(-1) : 1;
  Matrix m(columns > 0 ? values.numel() / columns : 0, columns);
  std::copy_n(values.const_data_ptr<double>(), values.numel(), m.values.begin());
  return m;
}

Store::Store(const Parameters& parameters, const Model& model, uint64_t dropout_seed)
    : dropout(dropout_seed, model.dropout()), rms_eps_(model.llama.eps), adapters_(model.adapters) {
  for (const auto& [name, value] : parameters) parameters_[name] = matrix(value), sizes_[name] = value.sizes().vec();
}

void Store::add(const std::string& name, const Matrix& gradient) {
  Matrix& known = gradients_[name];
  known = known.rows > 0 ? known + gradient : gradient;
}

std::map<std::string, at::Tensor> Store::gradients() const {
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

Matrix Store::keep(const std::string& name, const LinearGradients& g) {
  add(name + ".weight", g.weight);
  if (has(name + ".bias")) add(name + ".bias", g.bias);
  return g.x;
}

Matrix Store::linear(const std::string& name, const Matrix& x) {
  const Matrix y =
      exact::linear(x, parameters_.at(name + ".weight"), has(name + ".bias") ? parameters_.at(name + ".bias") : Matrix());
  const std::string down = name + ".lora_A.weight", up = name + ".lora_B.weight";
  if (!has(down)) return y;
  masks_[name] = dropout.mask(static_cast<int64_t>(x.values.size()), adapters_.dropout);
  const Matrix inner = exact::linear(times(x, masks_[name]), parameters_.at(down), {});
  return y + scaled(exact::linear(inner, parameters_.at(up), {}), adapters_.scale());
}

Matrix Store::linear_backward(const std::string& name, const Matrix& x, const Matrix& dy) {
  const Matrix dx = keep(name, exact::linear_backward(x, parameters_.at(name + ".weight"), dy));
  const std::string down = name + ".lora_A.weight", up = name + ".lora_B.weight";
  if (!has(down)) return dx;
  const Matrix kept = times(x, masks_.at(name)), inner = exact::linear(kept, parameters_.at(down), {});
  const LinearGradients of_up = exact::linear_backward(inner, parameters_.at(up), scaled(dy, adapters_.scale()));
  const LinearGradients of_down = exact::linear_backward(kept, parameters_.at(down), of_up.x);
  add(up, of_up.weight);
  add(down, of_down.weight);
  return dx + times(of_down.x, masks_.at(name));
}
Matrix Store::layer_norm(const std::string& name, const Matrix& x) const {
  return exact::layer_norm(x, parameters_.at(name + ".weight"), parameters_.at(name + ".bias"), kLayerNormEps);
}
Matrix Store::layer_norm_backward(const std::string& name, const Matrix& x, const Matrix& dy) {
  return keep(name, exact::layer_norm_backward(x, parameters_.at(name + ".weight"), dy, kLayerNormEps));
}
Matrix Store::rms_norm(const std::string& name, const Matrix& x, std::optional<double> eps) const {
  return exact::rms_norm(x, parameters_.at(name + ".weight"), eps.value_or(rms_eps_));
}
Matrix Store::rms_norm_backward(const std::string& name, const Matrix& x, const Matrix& dy, std::optional<double> eps) {
  return keep(name, exact::rms_norm_backward(x, parameters_.at(name + ".weight"), dy, eps.value_or(rms_eps_)));
}

void Store::embedding_backward(const std::string& name, const std::vector<int64_t>& rows, const Matrix& dy) {
  const Matrix& weight = parameters_.at(name);
  std::vector<Sum> sums(weight.values.size());
  for (int64_t i = 0; i < dy.rows; ++i)
    for (int64_t j = 0; j < dy.columns; ++j)
      sums[static_cast<size_t>(rows[static_cast<size_t>(i)] * dy.columns + j)].add(dy.at(i, j));
  Matrix gradient(weight.rows, weight.columns);
  for (size_t i = 0; i < sums.size(); ++i) gradient.values[i] = sums[i].value();
  add(name, gradient);
}

Tokens::Tokens(const Microbatch& data)
    : samples(data.input.size(0)), length(data.input.size(1)), words(values_of(data.input)), targets(values_of(data.target)) {}

BatchAttention::BatchAttention(const Tokens& tokens, const Attention& whole) {
  const size_t mask = whole.mask.size() / static_cast<size_t>(tokens.samples);
  for (int64_t s = 0; s < tokens.samples; ++s) {
    const auto own = [&](const Matrix& m) { return rows_of(m, s * tokens.length, tokens.length); };
    const auto begin = whole.mask.begin() + static_cast<int64_t>(mask) * s;
    const auto seen = whole.hidden.begin() + (whole.hidden.empty() ? 0 : s * tokens.length * tokens.length);
    const auto seen_end = whole.hidden.empty() ? seen : seen + tokens.length * tokens.length;
    samples_.push_back({own(whole.q),
                        own(whole.k),
                        own(whole.v),
                        whole.heads,
                        whole.kv_heads,
                        {begin, begin + static_cast<int64_t>(mask)},
                        {seen, seen_end}});
  }
}

Matrix BatchAttention::forward() const {
  Matrix output;
  for (const Attention& sample : samples_) append(output, attention(sample));
  return output;
}

AttentionGradients BatchAttention::backward(const Matrix& dy) const {
  AttentionGradients whole;
  int64_t row = 0;
  for (const Attention& sample : samples_) {
    const AttentionGradients g = attention_backward(sample, rows_of(dy, row, sample.q.rows));
    append(whole.q, g.q);
    append(whole.k, g.k);
    append(whole.v, g.v);
    row += sample.q.rows;
  }
  return whole;
}

namespace {

// The loss, and its weighted gradient in place of the logits.
double token_loss(Matrix& logits, const std::vector<int64_t>& targets, double weight, double of_routers) {
  Sum loss;
  for (int64_t i = 0; i < logits.rows; ++i) {
    const int64_t target = targets[static_cast<size_t>(i)];
    double most = logits.at(i, 0);
    for (int64_t j = 1; j < logits.columns; ++j) most = std::max(most, logits.at(i, j));
    Sum powers;
    for (int64_t j = 0; j < logits.columns; ++j) powers.add(exp(logits.at(i, j) - most));
    const double sum = powers.value();
    loss.add(log(sum) - rounded(logits.at(i, target) - most));
    for (int64_t j = 0; j < logits.columns; ++j)
      logits.at(i, j) = rounded(weight * (exp(logits.at(i, j) - most) / sum - (j == target ? 1 : 0)));
  }
  return (loss.value() + of_routers) * weight;
}

}  // namespace

Matrix head_pass(const std::string& tied, Store& store, const Matrix& x, const Tokens& tokens, double weight, double& loss) {
  Matrix logits = tied.empty() ? store.linear("lm_head", x) : exact::linear(x, store[tied], {});
  loss = token_loss(logits, tokens.targets, weight, store.routers.loss);
  if (tied.empty()) return store.linear_backward("lm_head", x, logits);
  const LinearGradients g = exact::linear_backward(x, store[tied], logits);
  store.add(tied, g.weight);
  return g.x;
}

}  // namespace golden::exact
