#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "internal/nn/canonical/fixed_point.h"
#include "shardproof/base/check.h"
#include "shardproof/device/device.h"
#include "shardproof/device/model_math.h"
#include "shardproof/nn/canonical/canonical.h"

// Features of a token are never cut here, so their sums go by index; sums over tokens, for the weights, are exact.
namespace shardproof::canonical_ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

RowNorm row_norm_of(const at::Tensor& x, const at::Tensor& weight, double eps, bool centred) {
  const int64_t width = weight.numel();
  return {x.const_data_ptr<double>(), weight.const_data_ptr<double>(), x.numel() / width, width, eps, centred};
}

// Layer norm, or without a bias and not centred RMS norm.
struct Norm : torch::autograd::Function<Norm> {
  static Variable forward(AutogradContext* ctx, const Variable& given, const Variable& weight,
                          const c10::optional<Variable>& bias, double eps, const std::string& name) {
    const at::Tensor x = fixed::require_double(given, name), w = fixed::require_double(weight, name);
    const at::Tensor b = bias ? fixed::require_double(*bias, name) : at::Tensor();
    ctx->save_for_backward({x, w});
    ctx->saved_data["name"] = name;
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["centred"] = bias.has_value();
    at::Tensor y = at::empty(x.sizes(), x.options());
    const double* offsets = b.defined() ? b.const_data_ptr<double>() : nullptr;
    model_math(device_math(x)).row_norm(row_norm_of(x, w, eps, bias.has_value()), offsets, y.mutable_data_ptr<double>());
    return y;
  }

  static variable_list backward(AutogradContext* ctx, variable_list dys) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &w = saved[1], dy = dys[0].contiguous();
    const std::string name = ctx->saved_data["name"].toStringRef();
    const bool centred = ctx->saved_data["centred"].toBool();
    const RowNorm norm = row_norm_of(x, w, ctx->saved_data["eps"].toDouble(), centred);
    fixed::require_terms(norm.rows, name);
    at::Tensor dx = at::empty(x.sizes(), x.options()), terms = at::empty({norm.rows, norm.width}, x.options());
    model_math(device_math(x)).row_norm_backward(norm, dy.const_data_ptr<double>(), dx.mutable_data_ptr<double>(),
                                                 terms.mutable_data_ptr<double>());
    const std::string what = name + ", gradients of the parameters";
    const at::Tensor of_bias = centred ? fixed::sum_of_rows(dy.view_as(terms), what) : at::Tensor();
    return {dx, fixed::sum_of_rows(terms, what), of_bias, {}, {}};
  }
};

void require_width(const at::Tensor& x, const at::Tensor& weight, const std::string& name) {
  SHARD_REQUIRE(x.dim() >= 1 && weight.dim() == 1 && x.size(-1) == weight.size(0) && weight.size(0) > 0, "canonical",
                "{}: norms the last dim of {}, and has {} weights; there must be as many, at least one", name,
                fmt::join(x.sizes(), "x"), weight.numel());
}

}  // namespace

at::Tensor layer_norm(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, double eps,
                      const std::string& name) {
  require_width(x, weight, name);
  require_width(x, bias, name);
  return Norm::apply(x, weight, c10::make_optional(bias), eps, name);
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps, const std::string& name) {
  require_width(x, weight, name);
  return Norm::apply(x, weight, c10::nullopt, eps, name);
}

}  // namespace shardproof::canonical_ops
