#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>

#include "nn/canonical/fixed_point.h"
#include "shardproof/base/check.h"
#include "shardproof/nn/canonical/canonical.h"

// One element at a time through the C library: LibTorch's vector bodies and scalar tails differ, so its activations would
// depend on where a tensor is cut.
namespace shardproof::canonical_ops {
namespace {

using fixed::grid;
using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

struct Rounding {
  static constexpr const char* name = "round";
  static double value(double x) { return x; }
  static double derivative(double) { return 1; }
};

struct Relu {
  static constexpr const char* name = "relu";
  static double value(double x) { return x > 0 ? x : 0; }
  static double derivative(double x) { return x > 0 ? 1 : 0; }
};

struct Tanh {
  static constexpr const char* name = "tanh";
  static double value(double x) { return std::tanh(x); }
  static double derivative(double x) {
    const double y = std::tanh(x);
    return 1 - y * y;
  }
};

struct Gelu {
  static constexpr const char* name = "gelu";
  static constexpr double kRootHalf = 0.7071067811865476, kPeak = 0.3989422804014327;  // sqrt(1/2), 1 / sqrt(2 pi)
  static double below(double x) { return 0.5 * (1 + std::erf(x * kRootHalf)); }
  static double value(double x) { return x * below(x); }
  static double derivative(double x) { return below(x) + x * (std::exp(-0.5 * x * x) * kPeak); }
};

struct Silu {
  static constexpr const char* name = "silu";
  static double value(double x) { return x / (1 + std::exp(-x)); }
  static double derivative(double x) {
    const double share = 1 / (1 + std::exp(-x));
    return share * (1 + x * (1 - share));
  }
};

template <class Rule>
struct Elementwise : torch::autograd::Function<Elementwise<Rule>> {
  static Variable forward(AutogradContext* ctx, const Variable& given) {
    const at::Tensor x = fixed::require_double(given, Rule::name);
    ctx->save_for_backward({x});
    at::Tensor y = at::empty(x.sizes(), x.options());
    const double* from = x.const_data_ptr<double>();
    double* to = y.mutable_data_ptr<double>();
    for (int64_t i = 0; i < x.numel(); ++i) to[i] = grid(Rule::value(from[i]));
    return y;
  }
  static variable_list backward(AutogradContext* ctx, variable_list dys) {
    const at::Tensor x = ctx->get_saved_variables()[0], dy = dys[0].contiguous();
    at::Tensor dx = at::empty(x.sizes(), x.options());
    const double *at_x = x.const_data_ptr<double>(), *from = dy.const_data_ptr<double>();
    double* to = dx.mutable_data_ptr<double>();
    for (int64_t i = 0; i < x.numel(); ++i) to[i] = grid(from[i] * Rule::derivative(at_x[i]));
    return {dx};
  }
};

struct Masked : torch::autograd::Function<Masked> {
  static at::Tensor product(const at::Tensor& x, const at::Tensor& mask) {
    at::Tensor y = at::empty(x.sizes(), x.options());
    for (int64_t i = 0; i < x.numel(); ++i)
      y.mutable_data_ptr<double>()[i] = grid(x.const_data_ptr<double>()[i] * mask.const_data_ptr<double>()[i]);
    return y;
  }
  static Variable forward(AutogradContext* ctx, const Variable& x, const at::Tensor& given_mask) {
    const at::Tensor mask = fixed::require_double(given_mask, "dropout");
    ctx->save_for_backward({mask});
    return product(fixed::require_double(x, "dropout"), mask);
  }
  static variable_list backward(AutogradContext* ctx, variable_list dy) {
    return {product(dy[0].contiguous(), ctx->get_saved_variables()[0]), {}};
  }
};

struct SquaredError : torch::autograd::Function<SquaredError> {
  static Variable forward(AutogradContext* ctx, const Variable& output, const at::Tensor& target) {
    const at::Tensor y = fixed::require_double(output, "squared_error"), t = target.to(at::kDouble).contiguous();
    at::Tensor error = at::empty(y.sizes(), y.options());
    fixed::require_terms(y.numel(), "squared_error");
    fixed::Terms terms;
    uint64_t sum = 0;
    for (int64_t i = 0; i < y.numel(); ++i) {
      const double e = y.const_data_ptr<double>()[i] - grid(t.const_data_ptr<double>()[i]);
      error.mutable_data_ptr<double>()[i] = e;
      sum += terms.units(e * e);
    }
    terms.require_fit("squared_error");
    ctx->save_for_backward({error});
    return at::full({}, fixed::value(sum), y.options());
  }
  static variable_list backward(AutogradContext* ctx, variable_list dy) {
    const at::Tensor error = ctx->get_saved_variables()[0];
    const double factor = 2 * dy[0].item<double>();
    at::Tensor dx = at::empty(error.sizes(), error.options());
    for (int64_t i = 0; i < error.numel(); ++i)
      dx.mutable_data_ptr<double>()[i] = grid(factor * error.const_data_ptr<double>()[i]);
    return {dx, {}};
  }
};

}  // namespace

at::Tensor round(const at::Tensor& x) {
  return Elementwise<Rounding>::apply(x);
}
at::Tensor relu(const at::Tensor& x) {
  return Elementwise<Relu>::apply(x);
}
at::Tensor tanh(const at::Tensor& x) {
  return Elementwise<Tanh>::apply(x);
}
at::Tensor gelu(const at::Tensor& x) {
  return Elementwise<Gelu>::apply(x);
}
at::Tensor silu(const at::Tensor& x) {
  return Elementwise<Silu>::apply(x);
}

at::Tensor dropout(const at::Tensor& x, const at::Tensor& mask) {
  SHARD_REQUIRE(x.sizes() == mask.sizes(), "canonical", "dropout: a mask of sizes {} for {}", fmt::join(mask.sizes(), "x"),
                fmt::join(x.sizes(), "x"));
  return Masked::apply(x, mask);
}

at::Tensor squared_error(const at::Tensor& output, const at::Tensor& target) {
  SHARD_REQUIRE(output.sizes() == target.sizes(), "canonical", "squared_error of sizes {} and {}",
                fmt::join(output.sizes(), "x"), fmt::join(target.sizes(), "x"));
  return SquaredError::apply(output, target);
}

}  // namespace shardproof::canonical_ops
