#include "fixed_point.h"

#include <ATen/ATen.h>

#include "shardproof/check.h"

namespace shardproof::fixed {

void Terms::require_fit(const std::string& what) const {
  if (!fit())
    throw NonFiniteError(fmt::format(
        "[canonical] {}: a term is NaN, infinite or at least {} in magnitude, or a sum at least {}, which exact sums cannot "
        "hold. Lower the learning rate, or scale inputs or the loss down",
        what, kTermMax, kTotalMax));
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

at::Tensor product(const at::Tensor& a, const at::Tensor& b, const std::string& what) {
  const at::Tensor left = require_double(a, what), right = require_double(b, what);
  const int64_t rows = left.size(0), inner = left.size(1), columns = right.size(1);
  require_terms(inner, what);
  at::Tensor result = at::empty({rows, columns}, left.options());
  const double *x = left.const_data_ptr<double>(), *y = right.const_data_ptr<double>();
  double* out = result.mutable_data_ptr<double>();
  std::vector<uint64_t> sums(static_cast<size_t>(columns));
  Terms terms;
  for (int64_t i = 0; i < rows; ++i) {
    std::fill(sums.begin(), sums.end(), 0);
    for (int64_t k = 0; k < inner; ++k) {
      const double factor = x[i * inner + k];
      const double* row = y + k * columns;
      for (int64_t j = 0; j < columns; ++j) sums[static_cast<size_t>(j)] += terms.units(factor * row[j]);
    }
    for (int64_t j = 0; j < columns; ++j) out[i * columns + j] = value(sums[static_cast<size_t>(j)]);
  }
  terms.require_fit(what);
  return result;
}

at::Tensor sum_of_rows(const at::Tensor& x, const std::string& what) {
  const at::Tensor values = require_double(x, what);
  const int64_t rows = values.size(0), columns = values.size(1);
  require_terms(rows, what);
  const double* data = values.const_data_ptr<double>();
  std::vector<uint64_t> sums(static_cast<size_t>(columns));
  Terms terms;
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) sums[static_cast<size_t>(j)] += terms.units(data[i * columns + j]);
  terms.require_fit(what);
  at::Tensor result = at::empty({columns}, values.options());
  for (int64_t j = 0; j < columns; ++j) result.mutable_data_ptr<double>()[j] = value(sums[static_cast<size_t>(j)]);
  return result;
}

at::Tensor to_units(const at::Tensor& given, const std::string& what) {
  const at::Tensor values = require_double(given, what);
  at::Tensor result = at::empty(values.sizes(), values.options().dtype(at::kLong));
  const double* from = values.const_data_ptr<double>();
  int64_t* to = result.mutable_data_ptr<int64_t>();
  Terms terms;
  for (int64_t i = 0; i < values.numel(); ++i) to[i] = terms.exact_units(from[i]);
  terms.require_fit(what);
  return result;
}

at::Tensor from_units(const at::Tensor& units) {
  const at::Tensor whole = units.contiguous();
  at::Tensor result = at::empty(whole.sizes(), whole.options().dtype(at::kDouble));
  const int64_t* from = whole.const_data_ptr<int64_t>();
  double* to = result.mutable_data_ptr<double>();
  for (int64_t i = 0; i < whole.numel(); ++i) to[i] = value(static_cast<uint64_t>(from[i]));
  return result;
}

}  // namespace shardproof::fixed
