#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "internal/nn/canonical/fixed_point.h"
#include "shardproof/base/check.h"
#include "shardproof/device/device.h"
#include "shardproof/device/model_math.h"
#include "shardproof/nn/canonical/canonical.h"

// Rows are whole on a rank, so sums within one are taken in the order of indices, and are not of rounded terms.
namespace shardproof::canonical_ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

// Of rows [.., width]: the sum of a times b in the order of indices, [.., 1].
at::Tensor dots(const at::Tensor& a, const at::Tensor& b) {
  std::vector<int64_t> sizes = a.sizes().vec();
  const int64_t width = sizes.back();
  sizes.back() = 1;
  at::Tensor out = at::empty(sizes, a.options());
  model_math(device_math(a))
      .row_dots(a.const_data_ptr<double>(), b.const_data_ptr<double>(), out.numel(), width, out.mutable_data_ptr<double>());
  return out;
}

at::Tensor row_powers(const at::Tensor& x, const at::Tensor& most, const at::Tensor& divisor = {}) {
  at::Tensor y = at::empty(x.sizes(), x.options());
  model_math(device_math(x))
      .row_powers(x.const_data_ptr<double>(), most.const_data_ptr<double>(),
                  divisor.defined() ? divisor.const_data_ptr<double>() : nullptr, {}, most.numel(), x.size(-1),
                  y.mutable_data_ptr<double>());
  return y;
}

struct Softmax : torch::autograd::Function<Softmax> {
  static Variable forward(AutogradContext* ctx, const Variable& given) {
    const at::Tensor x = fixed::require_double(given, "softmax"), most = x.amax({-1}, /*keepdim=*/true);
    const at::Tensor raised = row_powers(x, most), shares = row_powers(x, most, dots(raised, at::ones_like(raised)));
    ctx->save_for_backward({shares});
    return shares;
  }
  static variable_list backward(AutogradContext* ctx, variable_list dys) {
    const at::Tensor shares = ctx->get_saved_variables()[0], dy = dys[0].contiguous(), along = dots(dy, shares);
    at::Tensor dx = at::empty(dy.sizes(), dy.options());
    model_math(device_math(dy))
        .row_slopes(dy.const_data_ptr<double>(), nullptr, along.const_data_ptr<double>(), shares.const_data_ptr<double>(), 1,
                    {}, along.numel(), dy.size(-1), dx.mutable_data_ptr<double>());
    return {dx};
  }
};

struct Shares : torch::autograd::Function<Shares> {
  static Variable forward(AutogradContext* ctx, const Variable& given, double more) {
    const at::Tensor x = fixed::require_double(given, "shares"), divisor = dots(x, at::ones_like(x)) + more;
    const at::Tensor shares = x / divisor;
    ctx->save_for_backward({shares, divisor});
    return shares;
  }
  static variable_list backward(AutogradContext* ctx, variable_list dys) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor dy = dys[0].contiguous();
    return {(dy - dots(dy, saved[0])) / saved[1], {}};
  }
};

struct LogSumExp : torch::autograd::Function<LogSumExp> {
  static Variable forward(AutogradContext* ctx, const Variable& given) {
    const at::Tensor x = fixed::require_double(given, "log_sum_exp"), most = x.amax({-1}, /*keepdim=*/true);
    const at::Tensor raised = row_powers(x, most), divisor = dots(raised, at::ones_like(raised));
    ctx->save_for_backward({row_powers(x, most, divisor)});
    at::Tensor log = at::empty(divisor.sizes(), divisor.options());
    model_math(device_math(x)).log(divisor.const_data_ptr<double>(), divisor.numel(), log.mutable_data_ptr<double>());
    return (log + most).squeeze(-1);
  }
  static variable_list backward(AutogradContext* ctx, variable_list dys) {
    return {ctx->get_saved_variables()[0] * dys[0].unsqueeze(-1)};
  }
};

struct Sum : torch::autograd::Function<Sum> {
  static Variable forward(AutogradContext* ctx, const Variable& given, const std::string& name) {
    ctx->saved_data["sizes"] = given.sizes().vec();
    const at::Tensor x = fixed::require_double(given, name), terms = dots(x, at::ones_like(x));
    return fixed::sum_of_rows(terms.view({terms.numel(), 1}), name).squeeze(0);
  }
  static variable_list backward(AutogradContext* ctx, variable_list dys) {
    return {dys[0].expand(ctx->saved_data["sizes"].toIntVector()), {}};
  }
};

struct Mixture : torch::autograd::Function<Mixture> {
  static Variable forward(AutogradContext* ctx, const Variable& given_rows, const Variable& given_weights) {
    const at::Tensor rows = fixed::require_double(given_rows, "mixture");
    const at::Tensor weights = fixed::require_double(given_weights, "mixture").unsqueeze(-1);
    ctx->save_for_backward({rows, weights});
    return fixed::grid(rows * weights).sum(-2);
  }
  static variable_list backward(AutogradContext* ctx, variable_list dys) {
    const variable_list saved = ctx->get_saved_variables();
    const at::Tensor dy = dys[0].unsqueeze(-2);
    return {fixed::grid(dy * saved[1]), fixed::grid(dy * saved[0]).sum(-1)};
  }
};

}  // namespace

at::Tensor softmax(const at::Tensor& x) {
  return Softmax::apply(x);
}

at::Tensor sigmoid(const at::Tensor& x) {
  return softmax(at::stack({x, at::zeros_like(x)}, -1)).select(-1, 0);
}

at::Tensor shares(const at::Tensor& x, double more) {
  return Shares::apply(x, more);
}

at::Tensor log_sum_exp(const at::Tensor& x) {
  return LogSumExp::apply(x);
}

at::Tensor sum(const at::Tensor& x, const std::string& name) {
  return Sum::apply(x, name);
}

at::Tensor mixture(const at::Tensor& rows, const at::Tensor& weights) {
  SHARD_REQUIRE(rows.dim() >= 2 && rows.sizes().slice(0, rows.dim() - 1) == weights.sizes(), "canonical",
                "mixture: rows [{}] and weights [{}]", fmt::join(rows.sizes(), "x"), fmt::join(weights.sizes(), "x"));
  return Mixture::apply(rows, weights);
}

}  // namespace shardproof::canonical_ops
