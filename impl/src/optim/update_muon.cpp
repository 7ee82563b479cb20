#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "shardproof/base/check.h"
#include "shardproof/optim/optimizer.h"
#include "internal/device/exact_sum.h"

namespace shardproof {
namespace {

constexpr int kIterations = 5;
constexpr double kA = 3.4445, kB = -4.7750, kC = 2.0315;  // of the quintic iteration (Jordan 2024)
constexpr double kEps = 1e-7;                              // the least norm that a matrix is divided by

// Near the orthogonal matrix nearest to `matrix`. Elementwise operations are separate and products are of contiguous operands,
// so the bits are a function of the matrix alone.
at::Tensor orthogonalized(const at::Tensor& matrix) {
  const at::Tensor floats = matrix.to(at::kFloat).contiguous();
  ExactSum squares(ExactSum::Term::square, floats.device());
  const FlatSpan elements{floats.const_data_ptr<float>(), floats.numel()};
  squares.add({&elements, 1});
  const auto norm = std::max(static_cast<float>(std::sqrt(squares.total())), static_cast<float>(kEps));
  at::Tensor x = floats / at::scalar_tensor(norm, at::kFloat);  // of a CPU number: any device
  const bool transposed = x.size(0) > x.size(1);
  if (transposed) x = x.t().contiguous();
  for (int i = 0; i < kIterations; ++i) {
    const at::Tensor a = at::mm(x, x.t().contiguous());
    const at::Tensor b = a * kB + at::mm(a, a) * kC;
    x = x * kA + at::mm(b, x);
  }
  return transposed ? x.t().contiguous() : x;
}

class Muon final : public UpdateRule {
 public:
  explicit Muon(const MuonOptions& options) : options_(options) {
    SHARD_REQUIRE(options.lr >= 0 && options.weight_decay >= 0 && options.momentum >= 0 && options.momentum < 1, "optimizer",
                  "muon: lr and weight_decay must not be negative and momentum in [0, 1), got {}, {}, {}", options.lr,
                  options.weight_decay, options.momentum);
  }

  std::vector<std::string> state_names() const override { return {"momentum_buffer"}; }
  bool needs_whole_parameters() const override { return true; }

  std::vector<Setting> settings() const override {
    return {{"lr", options_.lr},
            {"weight_decay", options_.weight_decay},
            {"momentum", options_.momentum},
            {"nesterov", true},
            {"ns_coefficients", std::vector<double>{kA, kB, kC}},
            {"eps", kEps},
            {"ns_steps", int64_t{kIterations}},
            {"adjust_lr_fn", std::monostate()}};
  }

  void update(const Update& u) const override {
    SHARD_REQUIRE(u.shape.size() == 2, "optimizer", "muon updates matrices; parameter {} has {} dims. Put it in another group",
                  u.name, u.shape.size());
    const double lr = options_.lr * u.lr_factor;
    const at::Tensor p = u.parameter.view(u.shape), g = u.gradient.view(u.shape), m = u.state[0].view(u.shape);
    p.mul_(1 - lr * options_.weight_decay * u.decay_factor);
    const at::Tensor share = g * (1 - options_.momentum);
    m.mul_(options_.momentum).add_(share);
    const at::Tensor direction = orthogonalized(share + m * options_.momentum);
    const double shape_factor = std::sqrt(std::max(1.0, static_cast<double>(u.shape[0]) / static_cast<double>(u.shape[1])));
    p.sub_(direction * (lr * shape_factor));
  }

 private:
  MuonOptions options_;
};

bool is_matrix(const std::string&, const Shape& shape) { return shape.size() == 2 && shape[0] > 0 && shape[1] > 0; }

}  // namespace

std::shared_ptr<UpdateRule> make_rule(const MuonOptions& options) { return std::make_shared<Muon>(options); }

Optimizer muon(Sharded& sharded, const MuonOptions& options, const AdamWOptions& others) {
  return {sharded, {{.takes = is_matrix, .rule = make_rule(options)}, {.rule = make_rule(others)}}};
}

}  // namespace shardproof
