#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "internal/nn/canonical/fixed_point.h"
#include "shardproof/base/check.h"
#include "shardproof/device/device.h"
#include "shardproof/device/model_math.h"
#include "shardproof/nn/canonical/canonical.h"

// Curves are kernels of one source for all devices (device/kernels/curves.h). LibTorch's differ between its vectors and their
// tails, and the C library's between machines. What consists of single IEEE operations is LibTorch's.
namespace shardproof::canonical_ops {
namespace {

using fixed::grid;
using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

struct Curve : torch::autograd::Function<Curve> {
  static Variable forward(AutogradContext* ctx, const Variable& given, Activation activation, const char* name) {
    const at::Tensor x = fixed::require_double(given, name);
    ctx->save_for_backward({x});
    ctx->saved_data["activation"] = static_cast<int64_t>(activation);
    at::Tensor y = at::empty(x.sizes(), x.options());
    model_math(device_math(x)).activate(activation, x.const_data_ptr<double>(), x.numel(), y.mutable_data_ptr<double>());
    return y;
  }
  static variable_list backward(AutogradContext* ctx, variable_list dys) {
    const at::Tensor x = ctx->get_saved_variables()[0], dy = dys[0].contiguous();
    const auto activation = static_cast<Activation>(ctx->saved_data["activation"].toInt());
    at::Tensor dx = at::empty(x.sizes(), x.options());
    model_math(device_math(x))
        .activate_backward(activation, x.const_data_ptr<double>(), dy.const_data_ptr<double>(), x.numel(),
                           dx.mutable_data_ptr<double>());
    return {dx, {}, {}};
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
  return Curve::apply(x, Activation::tanh, "tanh");
}
at::Tensor gelu(const at::Tensor& x) {
  return Curve::apply(x, Activation::gelu, "gelu");
}
at::Tensor silu(const at::Tensor& x) {
  return Curve::apply(x, Activation::silu, "silu");
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
