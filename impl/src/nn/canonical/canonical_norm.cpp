#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include <cmath>

#include "nn/canonical/fixed_point.h"
#include "shardproof/base/check.h"
#include "shardproof/nn/canonical/canonical.h"

// Features of a token are never cut here, so their sums go by index; sums over tokens, for the weights, are exact.
namespace shardproof::canonical_ops {
namespace {

using fixed::grid;
using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

struct Row {
  double mean = 0, scale = 0;  // of the values: normal = (x - mean) * scale
};

Row statistics(const double* x, int64_t width, double eps, bool centred) {
  Row row;
  if (centred) {
    for (int64_t j = 0; j < width; ++j) row.mean += x[j];
    row.mean /= static_cast<double>(width);
  }
  double squares = 0;
  for (int64_t j = 0; j < width; ++j) squares += (x[j] - row.mean) * (x[j] - row.mean);
  row.scale = 1 / std::sqrt(squares / static_cast<double>(width) + eps);
  return row;
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
    const int64_t width = w.numel(), rows = x.numel() / width;
    at::Tensor y = at::empty(x.sizes(), x.options());
    for (int64_t i = 0; i < rows; ++i) {
      const double* from = x.const_data_ptr<double>() + i * width;
      double* to = y.mutable_data_ptr<double>() + i * width;
      const Row row = statistics(from, width, eps, bias.has_value());
      for (int64_t j = 0; j < width; ++j) {
        const double scaled = (from[j] - row.mean) * row.scale * w.const_data_ptr<double>()[j];
        to[j] = grid(b.defined() ? scaled + b.const_data_ptr<double>()[j] : scaled);
      }
    }
    return y;
  }

  static variable_list backward(AutogradContext* ctx, variable_list dys) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &w = saved[1], dy = dys[0].contiguous();
    const std::string name = ctx->saved_data["name"].toStringRef();
    const bool centred = ctx->saved_data["centred"].toBool();
    const int64_t width = w.numel(), rows = x.numel() / width;
    fixed::require_terms(rows, name);
    at::Tensor dx = at::empty(x.sizes(), x.options());
    std::vector<uint64_t> weight_sums(static_cast<size_t>(width)), bias_sums(weight_sums);
    fixed::Terms terms;
    for (int64_t i = 0; i < rows; ++i) {
      const double *from = x.const_data_ptr<double>() + i * width, *above = dy.const_data_ptr<double>() + i * width;
      const Row row = statistics(from, width, ctx->saved_data["eps"].toDouble(), centred);
      double sum = 0, weighted = 0;
      for (int64_t j = 0; j < width; ++j) {
        const double normal = (from[j] - row.mean) * row.scale, d = above[j] * w.const_data_ptr<double>()[j];
        sum += d;
        weighted += d * normal;
        weight_sums[static_cast<size_t>(j)] += terms.units(above[j] * normal);
        bias_sums[static_cast<size_t>(j)] += terms.units(above[j]);
      }
      const double mean = centred ? sum / static_cast<double>(width) : 0, along = weighted / static_cast<double>(width);
      for (int64_t j = 0; j < width; ++j) {
        const double normal = (from[j] - row.mean) * row.scale, d = above[j] * w.const_data_ptr<double>()[j];
        dx.mutable_data_ptr<double>()[i * width + j] = grid((d - mean - normal * along) * row.scale);
      }
    }
    terms.require_fit(name + ", gradients of the parameters");
    const auto total = [&](const std::vector<uint64_t>& sums) {
      at::Tensor result = at::empty({width}, x.options());
      for (int64_t j = 0; j < width; ++j) result.mutable_data_ptr<double>()[j] = fixed::value(sums[static_cast<size_t>(j)]);
      return result;
    };
    return {dx, total(weight_sums), centred ? total(bias_sums) : at::Tensor(), {}, {}};
  }
};

void require_width(const at::Tensor& x, const at::Tensor& weight, const std::string& name) {
  SHARD_REQUIRE(x.dim() >= 1 && weight.dim() == 1 && x.size(-1) == weight.size(0), "canonical",
                "{}: norms the last dim of {}, and has {} weights", name, fmt::join(x.sizes(), "x"), weight.numel());
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
