#include "nn/canonical/fixed_point.h"

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

// The largest magnitude; NaN where there is one.
at::Tensor largest(const at::Tensor& x) {
  const auto [low, high] = at::aminmax(x);
  return at::maximum(low.neg(), high);
}

}  // namespace

Operand::Operand(const at::Tensor& matrix, const std::string& what) {
  const at::Tensor turned = matrix.transpose(-2, -1);
  transposed = !matrix.is_contiguous() && turned.is_contiguous();
  memory = require_double(transposed ? turned : matrix, what);
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

bool all_terms_fit(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0) return true;
  return (largest(a) * largest(b)).item<double>() < kTermMax - 1;
}

at::Tensor product(const at::Tensor& a, const at::Tensor& b, const std::string& what) {
  const at::Tensor result = at::empty({a.size(0), b.size(1)}, a.options());
  product_into(result, a, b, what);
  return result;
}

void product_into(const at::Tensor& out, const at::Tensor& a, const at::Tensor& b, const std::string& what) {
  const Operand left(a, what), right(b, what);
  require_terms(a.size(1), what);
  const ExactProduct task{.a = left.memory.const_data_ptr<double>(),
                          .b = right.memory.const_data_ptr<double>(),
                          .out = out.mutable_data_ptr<double>(),
                          .rows = a.size(0),
                          .inner = a.size(1),
                          .columns = b.size(1),
                          .a_transposed = left.transposed,
                          .b_transposed = right.transposed};
  const bool check = !all_terms_fit(left.memory, right.memory);
  require(model_math(device_math(out)).exact_product(task, check), what);
}

at::Tensor sum_of_rows(const at::Tensor& x, const std::string& what) {
  return product(at::ones({1, x.size(0)}, x.options()), x, what).view({x.size(1)});
}

at::Tensor units_of_terms(const at::Tensor& terms, const std::string& what) {
  const at::Tensor units = require_double(terms, what).mul(kUnits).round_();
  constexpr double kHalfRange = kTermMax * kUnits;
  require(everywhere(units.ge(-kHalfRange).logical_and(units.lt(kHalfRange))), what);
  return units.to(at::kLong);
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
