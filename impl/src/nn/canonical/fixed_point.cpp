#include "nn/canonical/fixed_point.h"

#include <ATen/ATen.h>

#include "shardproof/base/check.h"

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

namespace {

// Adding this makes an addition round to units; where it is added, a double's bits are units plus kShiftBits.
constexpr double kShift = 0x1.8p12;
constexpr uint64_t kShiftBits = std::bit_cast<uint64_t>(kShift);

// Whether every product of an element of one by one of the other is in range by a margin. Not so for NaN.
bool all_terms_fit(const at::Tensor& a, const at::Tensor& b) {
  if (a.numel() == 0 || b.numel() == 0) return true;
  return (a.abs().amax() * b.abs().amax()).item<double>() < kTermMax - 1;
}

// sums[j] += the units of sum over k of x[k] y[k, j], plus kShiftBits a term, which are not looked at.
[[gnu::always_inline]] inline void add_terms(uint64_t* sums, const double* x, const double* y, int64_t inner, int64_t columns) {
  const auto bits = [](double term) { return std::bit_cast<uint64_t>(term + kShift); };
  int64_t k = 0;
  for (; k + 4 <= inner; k += 4) {
    const double *row0 = y + k * columns, *row1 = row0 + columns, *row2 = row1 + columns, *row3 = row2 + columns;
    const double x0 = x[k], x1 = x[k + 1], x2 = x[k + 2], x3 = x[k + 3];
    for (int64_t j = 0; j < columns; ++j)
      sums[j] += bits(x0 * row0[j]) + bits(x1 * row1[j]) + bits(x2 * row2[j]) + bits(x3 * row3[j]);
  }
  for (; k < inner; ++k)
    for (int64_t j = 0; j < columns; ++j) sums[j] += bits(x[k] * y[k * columns + j]);
}

using AddTerms = void (*)(uint64_t*, const double*, const double*, int64_t, int64_t);

void add_terms_anywhere(uint64_t* sums, const double* x, const double* y, int64_t inner, int64_t columns) {
  add_terms(sums, x, y, inner, columns);
}
#if defined(__x86_64__)
// Without fused multiplication and addition, so of the same bits.
[[gnu::target("avx2")]] void add_terms_avx2(uint64_t* sums, const double* x, const double* y, int64_t inner, int64_t columns) {
  add_terms(sums, x, y, inner, columns);
}
const AddTerms kAddTerms = __builtin_cpu_supports("avx2") ? add_terms_avx2 : add_terms_anywhere;
#else
const AddTerms kAddTerms = add_terms_anywhere;
#endif

}  // namespace

at::Tensor product(const at::Tensor& a, const at::Tensor& b, const std::string& what) {
  const at::Tensor left = require_double(a, what), right = require_double(b, what);
  const int64_t rows = left.size(0), inner = left.size(1), columns = right.size(1);
  require_terms(inner, what);
  at::Tensor result = at::empty({rows, columns}, left.options());
  const double *x = left.const_data_ptr<double>(), *y = right.const_data_ptr<double>();
  double* out = result.mutable_data_ptr<double>();
  std::vector<uint64_t> sums(static_cast<size_t>(columns));
  const bool fit = all_terms_fit(left, right);
  Terms terms;
  for (int64_t i = 0; i < rows; ++i) {
    std::fill(sums.begin(), sums.end(), fit ? -(static_cast<uint64_t>(inner) * kShiftBits) : 0);
    if (fit) kAddTerms(sums.data(), x + i * inner, y, inner, columns);
    for (int64_t k = 0; k < inner && !fit; ++k)
      for (int64_t j = 0; j < columns; ++j) sums[static_cast<size_t>(j)] += terms.units(x[i * inner + k] * y[k * columns + j]);
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
