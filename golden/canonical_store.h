// What the canonical models have in common: parameters and gradients by name, tokens, the loss.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "golden/canonical_attention.h"
#include "golden/canonical_math.h"
#include "golden/dropout.h"
#include "golden/golden.h"
#include "golden/models.h"

namespace golden::exact {

constexpr double kLayerNormEps = 1e-5;

Matrix matrix(const at::Tensor& tensor);

// What a forward needs and leaves of the model's routers; see Forward.
struct Routers {
  bool training = true;
  double weight = 1;  // of the model's loss
  const Counts* of_step = nullptr;
  double loss = 0;
  Counts counts = {};
};

// Parameters and the gradients that were found, by name.
class Store {
 public:
  Store(const Parameters& parameters, const Model& model, uint64_t dropout_seed);
  bool has(const std::string& name) const { return parameters_.contains(name); }
  const Matrix& operator[](const std::string& name) const { return parameters_.at(name); }
  void add(const std::string& name, const Matrix& gradient);
  std::map<std::string, at::Tensor> gradients() const;

  // Of the module `name`, with a bias and an adapter if it has them; backwards add the gradients of its parameters and give the
  // input's. A linear layer is used once in a forward.
  Matrix linear(const std::string& name, const Matrix& x);
  Matrix linear_backward(const std::string& name, const Matrix& x, const Matrix& dy);
  Matrix layer_norm(const std::string& name, const Matrix& x) const;
  Matrix layer_norm_backward(const std::string& name, const Matrix& x, const Matrix& dy);
  Matrix rms_norm(const std::string& name, const Matrix& x, std::optional<double> eps = {}) const;  // nothing: the model's
  Matrix rms_norm_backward(const std::string& name, const Matrix& x, const Matrix& dy, std::optional<double> eps = {});
  // Of rows that were looked up in an embedding.
  void embedding_backward(const std::string& name, const std::vector<int64_t>& rows, const Matrix& dy);

  Dropout dropout;  // of the model, and of the adapters
  Routers routers;

 private:
  Matrix keep(const std::string& name, const LinearGradients& g);

  double rms_eps_;
  Adapters adapters_;
  std::map<std::string, std::vector<double>> masks_;  // of adapters, by layer
  std::map<std::string, Matrix> parameters_, gradients_;
  std::map<std::string, std::vector<int64_t>> sizes_;
};

// Rows [samples * length, ..], sample by sample.
struct Tokens {
  int64_t samples, length;
  std::vector<int64_t> words, targets;
  explicit Tokens(const Microbatch& data);
};

// The attention of every sample of a batch. `mask` is [samples, heads, length, length], or empty, and
// `hidden` [samples, length, length], or empty.
class BatchAttention {
 public:
  BatchAttention() = default;
  BatchAttention(const Tokens& tokens, const Attention& whole);
  Matrix forward() const;
  AttentionGradients backward(const Matrix& dy) const;

 private:
  std::vector<Attention> samples_;
};

// Logits and the loss of them, forwards and back: gives the gradient of x. `tied`: the parameter that is the head's weight; "":
// the head is the linear layer "lm_head".
Matrix head_pass(const std::string& tied, Store& store, const Matrix& x, const Tokens& tokens, double weight, double& loss);

}  // namespace golden::exact
