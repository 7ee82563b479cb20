#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "internal/device/matrix.h"
#include "internal/nn/canonical/fixed_point.h"
#include "shardproof/base/check.h"
#include "shardproof/nn/canonical/canonical.h"

namespace shardproof::canonical_ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Variable;
using torch::autograd::variable_list;

std::string kept_name(AutogradContext* ctx) {
  return ctx->saved_data["name"].toStringRef();
}

struct Linear : torch::autograd::Function<Linear> {
  static Variable forward(AutogradContext* ctx, const Variable& x, const Variable& weight, const std::string& name) {
    const fixed::Operand rows(rows_of(x), name), matrix(weight.t(), name);
    ctx->save_for_backward({x, weight});
    ctx->saved_data["name"] = name;
    ctx->saved_data["magnitudes"] = std::vector<double>{rows.magnitude, matrix.magnitude};
    std::vector<int64_t> sizes = x.sizes().vec();
    sizes.back() = weight.size(0);
    return fixed::product(rows, matrix, name).view(sizes);
  }
  static variable_list backward(AutogradContext* ctx, variable_list dys) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1];
    const std::vector<double> magnitudes = ctx->saved_data["magnitudes"].toDoubleVector();
    const std::string name = kept_name(ctx);
    const fixed::Operand dy(rows_of(dys[0]), name);
    at::Tensor dx, dw;
    if (ctx->needs_input_grad(0))
      dx = fixed::product(dy, fixed::Operand(weight, name, magnitudes[1]), name + ", gradient of the input").view(x.sizes());
    if (ctx->needs_input_grad(1))
      dw = fixed::product(dy.turned(), fixed::Operand(rows_of(x), name, magnitudes[0]), name + ", gradient of the weight");
    return {dx, dw, {}};
  }
};

struct AddBias : torch::autograd::Function<AddBias> {
  static Variable forward(AutogradContext* ctx, const Variable& given, const Variable& bias, const std::string& name) {
    ctx->saved_data["name"] = name;
    ctx->saved_data["sizes"] = bias.sizes().vec();
    const at::Tensor x = fixed::require_double(given, name), b = fixed::require_double(bias, name);
    return x + fixed::grid(b);
  }
  static variable_list backward(AutogradContext* ctx, variable_list dy) {
    at::Tensor db;
    if (ctx->needs_input_grad(1)) {
      const std::vector<int64_t> sizes = ctx->saved_data["sizes"].toIntVector();
      const int64_t leading = dy[0].dim() - std::ssize(sizes);  // a rank may have no features
      const at::Tensor rows =
          dy[0].reshape({c10::multiply_integers(dy[0].sizes().slice(0, leading)), c10::multiply_integers(sizes)});
      db = fixed::sum_of_rows(rows, kept_name(ctx) + ", gradient of the bias").view(sizes);
    }
    return {dy[0], db, {}};
  }
};

// The rows of a weight that tokens stand for. A token that has none takes row 0, and is not its own.
struct Rows {
  at::Tensor numbers, own;  // [tokens] and [tokens, 1]
  Rows(const at::Tensor& tokens, int64_t rows)
      : numbers(tokens.reshape({-1})), own(numbers.ge(0).logical_and(numbers.lt(rows)).unsqueeze(-1)) {
    numbers = at::where(own.squeeze(-1), numbers, 0);
  }
};

struct Embedding : torch::autograd::Function<Embedding> {
  static Variable forward(AutogradContext* ctx, const Variable& given, const at::Tensor& given_tokens,
                          const std::string& name) {
    const at::Tensor weight = fixed::require_double(given, name), tokens = given_tokens.contiguous();
    ctx->save_for_backward({tokens});
    ctx->saved_data["name"] = name;
    ctx->saved_data["sizes"] = weight.sizes().vec();
    std::vector<int64_t> sizes = tokens.sizes().vec();
    sizes.push_back(weight.size(1));
    if (weight.size(0) == 0) return at::zeros(sizes, weight.options());
    const Rows rows(tokens, weight.size(0));
    return fixed::grid(at::where(rows.own, weight.index_select(0, rows.numbers), 0.0)).view(sizes);
  }
  static variable_list backward(AutogradContext* ctx, variable_list dys) {
    const at::Tensor tokens = ctx->get_saved_variables()[0];
    const std::string what = kept_name(ctx) + ", gradient of the weight";
    const std::vector<int64_t> sizes = ctx->saved_data["sizes"].toIntVector();
    fixed::require_terms(tokens.numel(), what);
    at::Tensor sums = at::zeros(sizes, dys[0].options().dtype(at::kLong));
    if (sizes[0] > 0) {
      const Rows rows(tokens, sizes[0]);
      const at::Tensor terms = at::where(rows.own, dys[0].reshape({tokens.numel(), sizes[1]}), 0.0);
      sums.index_add_(0, rows.numbers, fixed::units_of_terms(terms, what));
    }
    return {fixed::from_units(sums), {}, {}};
  }
};

}  // namespace

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, const std::string& name) {
  SHARD_REQUIRE(x.dim() >= 1 && weight.dim() == 2 && x.size(-1) == weight.size(1), "canonical",
                "{}: an input of sizes {} and a weight of {}", name, fmt::join(x.sizes(), "x"), fmt::join(weight.sizes(), "x"));
  const at::Tensor y = Linear::apply(x, weight, name);
  return bias.defined() ? add_bias(y, bias, name) : y;
}

at::Tensor add_bias(const at::Tensor& x, const at::Tensor& bias, const std::string& name) {
  SHARD_REQUIRE(x.dim() >= bias.dim() && x.sizes().slice(x.dim() - bias.dim()) == bias.sizes(), "canonical",
                "{}: a bias of sizes {} on {}", name, fmt::join(bias.sizes(), "x"), fmt::join(x.sizes(), "x"));
  return AddBias::apply(x, bias, name);
}

at::Tensor embedding(const at::Tensor& weight, const at::Tensor& tokens, const std::string& name) {
  SHARD_REQUIRE(weight.dim() == 2 && tokens.scalar_type() == at::kLong, "canonical",
                "{}: a weight of {} dims and tokens of dtype {}; expected 2 and int64", name, weight.dim(),
                c10::toString(tokens.scalar_type()));
  return Embedding::apply(weight, tokens, name);
}

}  // namespace shardproof::canonical_ops
