#include "internal/nn/canonical/fixed_point.h"

#include <ATen/ATen.h>

#include "shardproof/base/check.h"
#include "shardproof/device/device.h"
#include "shardproof/device/model_math.h"

namespace shardproof::fixed {

namespace {

void require(bool fit, const std::string& what) {
  if (fit) return;
  throw NonFiniteError(fmt::format(
      "[canonical] {}: a term is NaN, infinite or at least {} in magnitude, or a sum at least {}, which exact sums cannot "
      "hold. Lower the learning rate, or scale inputs or the loss down",
      what, kTermMax, kTotalMax));
}

bool everywhere(const at::Tensor& condition) {
  return condition.all().item<bool>();
}

}  // namespace

double largest_magnitude(const at::Tensor& x) {
  return model_math(device_math(x)).largest_magnitude(x.const_data_ptr<double>(), x.numel());
}

Operand::Operand(const at::Tensor& matrix, const std::string& what, double magnitude) : magnitude(magnitude) {
  const at::Tensor turned = matrix.transpose(-2, -1);
  transposed = !matrix.is_contiguous() && turned.is_contiguous();
  memory = require_double(transposed ? turned : matrix, what);
}

Operand::Operand(const at::Tensor& matrix, const std::string& what) : Operand(matrix, what, 0) {
  magnitude = largest_magnitude(memory);
}

Operand Operand::turned() const {
  Operand result = *this;
  result.transposed = !transposed;
  return result;
}

void Terms::require_fit(const std::string& what) const {
  require(fit_, what);
}

void require_terms(int64_t count, const std::string& what) {
  SHARD_REQUIRE(count <= kTermsMax, "canonical", "{}: a sum of {} terms; exact sums have at most {}. Use smaller microbatches",
                what, count, kTermsMax);
}

at::Tensor require_double(const at::Tensor& x, const std::string& what) {
  SHARD_REQUIRE(x.scalar_type() == at::kDouble, "canonical",
                "{}: computes in float64, and was given {}. Set Precision::compute to float64, or convert the module", what,
                c10::toString(x.scalar_type()));
  return x.contiguous();
}

at::Tensor grid(const at::Tensor& x) {
  const at::Tensor given = x.contiguous();
  at::Tensor result = at::empty(given.sizes(), given.options());
  model_math(device_math(given)).grid(given.const_data_ptr<double>(), given.numel(), result.mutable_data_ptr<double>());
  return result;
}

at::Tensor product(const Operand& a, const Operand& b, const std::string& what) {
  const at::Tensor result = at::empty({a.rows(), b.columns()}, a.memory.options());
  product_into(result, a, b, what);
  return result;
}

at::Tensor product(const at::Tensor& a, const at::Tensor& b, const std::string& what) {
  return product(Operand(a, what), Operand(b, what), what);
}

void product_into(const at::Tensor& out, const Operand& a, const Operand& b, const std::string& what) {
  require_terms(a.columns(), what);
  const ExactProduct task{.a = a.memory.const_data_ptr<double>(),
                          .b = b.memory.const_data_ptr<double>(),
                          .out = out.mutable_data_ptr<double>(),
                          .rows = a.rows(),
                          .inner = a.columns(),
                          .columns = b.columns(),
                          .largest_term = a.magnitude * b.magnitude,
                          .a_transposed = a.transposed,
                          .b_transposed = b.transposed};
  require(model_math(device_math(out)).exact_product(task), what);
}

at::Tensor sum_of_rows(const at::Tensor& x, const std::string& what) {
  const at::Tensor ones = at::ones({1, x.size(0)}, x.options());
  return product(Operand(ones, what, 1), Operand(x, what), what).view({x.size(1)});
}

bool add_row_sums(const at::Tensor& units, const at::Tensor& x, double magnitude) {
  const at::Tensor ones = at::ones({x.size(-1)}, x.options());
  return model_math(device_math(x))
      .exact_product({.a = ones.const_data_ptr<double>(),
                      .b = x.const_data_ptr<double>(),
                      .rows = 1,
                      .inner = x.size(-1),
                      .columns = units.numel(),
                      .units = units.mutable_data_ptr<int64_t>(),
                      .largest_term = magnitude,
                      .b_transposed = true});
}

at::Tensor units_of_terms(const at::Tensor& terms, const std::string& what) {
  const at::Tensor given = require_double(terms, what), units = at::zeros(given.sizes(), given.options().dtype(at::kLong));
  require(add_row_sums(units, given.unsqueeze(-1), largest_magnitude(given)), what);  // rows of one term
  return units;
}

at::Tensor to_units(const at::Tensor& values, const std::string& what) {
  const at::Tensor given = require_double(values, what);
  require(everywhere(given.abs().lt(kTotalMax)), what);
  return given.mul(kUnits).round_().to(at::kLong);
}

at::Tensor from_units(const at::Tensor& units) {
  return units.to(at::kDouble, /*non_blocking=*/false, /*copy=*/true, at::MemoryFormat::Contiguous).mul_(kUnit);
}

}  // namespace shardproof::fixed
