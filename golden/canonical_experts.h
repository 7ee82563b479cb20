// The MLPs of a llama's layers in canonical arithmetic, by plain loops: the gated one, and the mixture of experts. Sums of a
// token's scores are taken by index, and are not of rounded terms; see Llama and Model::canonical in golden.h.
#pragma once

#include <string>
#include <vector>

#include "golden/canonical_store.h"

namespace golden::exact {

// Element by element, not rounded.
Matrix product(const Matrix& a, const Matrix& b);

// `backward` once, after `forward`.
class GatedMlp {
 public:
  // `prefix`: of the names of its linear layers.
  GatedMlp(Store& store, std::string prefix) : store_(store), name_(std::move(prefix)) {}
  Matrix forward(const Matrix& x);
  Matrix backward(const Matrix& dy);

 private:
  Store& store_;
  std::string name_;
  Matrix x_, gate_, up_;
};

class Mixture {
 public:
  Mixture(const Llama& llama, Store& store, const std::string& prefix);
  Matrix forward(const Matrix& x, int64_t length);  // of sequences of so many tokens
  Matrix backward(const Matrix& dy);

 private:
  struct Route {
    std::vector<int64_t> experts;
    std::vector<double> logits, scores, unscaled, weights;
    double divisor = 1;
  };
  struct Expert {
    std::vector<int64_t> rows;  // token * experts_per_token + choice
    Matrix x, gate, up;
  };
  std::vector<int64_t> chosen(std::vector<double> scores) const;
  Route route(std::vector<double> logits) const;
  std::vector<double> route_backward(const Route& route, std::vector<double> d) const;
  void add_losses(int64_t length);  // of routes_
  std::vector<double> losses_backward(size_t token) const;
  std::vector<bool> dropped(int64_t length) const;  // of routes_

  const Llama& llama_;
  Store& store_;
  std::string name_;
  GatedMlp shared_;
  Matrix x_, outputs_;
  std::vector<Route> routes_;
  std::vector<std::vector<double>> busy_;  // f of each token's sequence
  std::vector<Expert> experts_;
};

}  // namespace golden::exact
