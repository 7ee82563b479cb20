#include "harness/case/exact_data.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "harness/case/random.h"
#include "shardproof/base/check.h"

namespace harness {
namespace {

constexpr double kParameterQuantum = 0.5;  // of parameters; data are integers
constexpr int64_t kFloatBits = 24;

// Multiples of `quantum`, at most two of them, all but `percent` of them zero.
void fill(const at::Tensor& tensor, const Draws& draws, double quantum, int64_t percent) {
  float* data = tensor.mutable_data_ptr<float>();
  for (int64_t i = 0; i < tensor.numel(); ++i) {
    const bool stays = draws.integer(2 * i, 1, 100) <= percent;
    data[i] = stays ? static_cast<float>(quantum * static_cast<double>(draws.integer(2 * i + 1, -2, 2))) : 0.0f;
  }
}

// Absolute values of a tensor that holds multiples of `quantum`.
struct Bound {
  at::Tensor magnitude;
  double quantum = 1;

  double bits() const {
    return magnitude.defined() ? std::log2(magnitude.max().item<double>() / quantum + 1) : 0;
  }
  void add(const Bound& term) {
    magnitude = magnitude.defined() ? magnitude + term.magnitude : term.magnitude;
    quantum = std::min(quantum, term.quantum);
  }
};

at::Tensor magnitude(const at::Tensor& tensor) { return tensor.to(at::kDouble).abs(); }

// Follows forward and backward with absolute values, over all microbatches.
class Bounds {
 public:
  explicit Bounds(const golden::Run& run) : with_bias_(run.model.mlp.bias) {
    const size_t a_layer = with_bias_ ? 2 : 1;
    for (size_t i = 0; i < run.parameters.size(); i += a_layer) {
      weights_.push_back(magnitude(run.parameters[i].second));
      biases_.push_back(with_bias_ ? magnitude(run.parameters[i + 1].second) : at::Tensor());
    }
    weight_gradients_.resize(weights_.size());
    bias_gradients_.resize(weights_.size());
  }

  void add(const golden::Microbatch& microbatch) {
    std::vector<Bound> activations = {{magnitude(microbatch.input), 1}};
    for (size_t i = 0; i < weights_.size(); ++i) {
      const Bound& x = activations[i];
      Bound y{x.magnitude.matmul(weights_[i].t()), x.quantum * kParameterQuantum};
      if (with_bias_) y.magnitude += biases_[i];
      note(y);
      activations.push_back(std::move(y));
    }
    const Bound& output = activations.back();
    const double twice = 2 * microbatch.weight;  // the gradient of weight * error^2
    Bound delta{(output.magnitude + magnitude(microbatch.target)) * twice, output.quantum * twice};
    for (size_t i = weights_.size(); i-- > 0;) {
      note(delta);
      const Bound& x = activations[i];
      weight_gradients_[i].add({delta.magnitude.t().matmul(x.magnitude), delta.quantum * x.quantum});
      bias_gradients_[i].add({delta.magnitude.sum(0), delta.quantum});
      delta = {delta.magnitude.matmul(weights_[i]), delta.quantum * kParameterQuantum};
    }
  }

  int64_t most() const {
    double most = most_;
    for (const auto& gradients : {weight_gradients_, bias_gradients_})
      for (const Bound& gradient : gradients) most = std::max(most, gradient.bits());
    return static_cast<int64_t>(std::ceil(most));
  }

 private:
  void note(const Bound& bound) { most_ = std::max(most_, bound.bits()); }

  bool with_bias_;
  std::vector<at::Tensor> weights_, biases_;
  std::vector<Bound> weight_gradients_, bias_gradients_;
  double most_ = 0;
};

}  // namespace

int64_t bits_needed(const golden::Run& run) {
  Bounds bounds(run);
  for (const golden::Step& step : run.steps)
    for (const auto& round : step.microbatches)
      for (const golden::Microbatch& microbatch : round) bounds.add(microbatch);
  return bounds.most();
}

void make_exact(golden::Run& run, uint64_t seed) {
  const auto& rounds = run.steps.at(0).microbatches;
  for (size_t round = 0; round < rounds.size(); ++round)
    for (size_t rank = 0; rank < rounds[round].size(); ++rank) {
      const Draws here = Draws(seed, "exact").at(static_cast<int64_t>(round)).at(static_cast<int64_t>(rank));
      fill(rounds[round][rank].input, here.at(1), 1, 100);
      fill(rounds[round][rank].target, here.at(2), 1, 100);
    }
  for (int64_t percent = 100; percent > 0; percent /= 2) {
    for (const auto& [name, value] : run.parameters) fill(value, Draws(seed, name), kParameterQuantum, percent);
    if (bits_needed(run) <= kFloatBits) return;
  }
  throw shardproof::Error(
      "[case] exact: sums over so many layers, samples and ranks need more digits than a float has. Use fewer or narrower "
      "layers, or fewer ranks");
}

}  // namespace harness
