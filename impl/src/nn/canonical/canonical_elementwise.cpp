#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>

#include "nn/canonical/fixed_point.h"
#include "shardproof/base/check.h"
#include "shardproof/nn/canonical/canonical.h"

// Curves go through the C library, one element at a time: LibTorch's vector bodies and scalar tails differ, so its activations
// would depend on where a tensor is cut. What consists of single IEEE operations is LibTorch's, on any device.
namespace shardproof::canonical_ops {
namespace {

using fixed::grid;
using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

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
struct Curve : torch::autograd::Function<Curve<Rule>> {
  static Variable forward(AutogradContext* ctx, const Variable& given) {
    const at::Tensor x = fixed::require_host(given, Rule::name);
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

struct Rounding : torch::autograd::Function<Rounding> {
  static Variable forward(AutogradContext*, const Variable& x) { return grid(fixed::require_double(x, "round")); }
  static variable_list backward(AutogradContext*, variable_list dys) { return {grid(dys[0])}; }
};

struct Relu : torch::autograd::Function<Relu> {
  static Variable forward(AutogradContext* ctx, const Variable& given) {
    const at::Tensor x = fixed::require_double(given, "relu"), passes = x.gt(0);
    ctx->save_for_backward({passes});
    return grid(at::where(passes, x, 0.0));
  }
  static variable_list backward(AutogradContext* ctx, variable_list dys) {
    return {grid(dys[0] * ctx->get_saved_variables()[0].to(at::kDouble))};
  }
};

struct Masked : torch::autograd::Function<Masked> {
  static Variable forward(AutogradContext* ctx, const Variable& x, const at::Tensor& given_mask) {
    const at::Tensor mask = fixed::require_double(given_mask, "dropout");
    ctx->save_for_backward({mask});
    return grid(fixed::require_double(x, "dropout") * mask);
  }
  static variable_list backward(AutogradContext* ctx, variable_list dy) {
    return {grid(dy[0].contiguous() * ctx->get_saved_variables()[0]), {}};
  }
};

struct SquaredError : torch::autograd::Function<SquaredError> {
  static Variable forward(AutogradContext* ctx, const Variable& output, const at::Tensor& target) {
    const at::Tensor y = fixed::require_double(output, "squared_error");
    const at::Tensor error = y - grid(target.to(at::kDouble).contiguous());
    ctx->save_for_backward({error});
    return fixed::sum_of_rows((error * error).reshape({-1, 1}), "squared_error").squeeze(0);
  }
  static variable_list backward(AutogradContext* ctx, variable_list dy) {
    return {grid(ctx->get_saved_variables()[0] * (2 * dy[0])), {}};
  }
};

}  // namespace

at::Tensor round(const at::Tensor& x) {
  return Rounding::apply(x);
}
at::Tensor relu(const at::Tensor& x) {
  return Relu::apply(x);
}
at::Tensor tanh(const at::Tensor& x) {
  return Curve<Tanh>::apply(x);
}
at::Tensor gelu(const at::Tensor& x) {
  return Curve<Gelu>::apply(x);
}
at::Tensor silu(const at::Tensor& x) {
  return Curve<Silu>::apply(x);
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
