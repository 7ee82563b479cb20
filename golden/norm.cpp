#include "golden/norm.h"

#include <ATen/ATen.h>

#include <cmath>

namespace golden {

void ExactSum::add(double term) {
  size_t kept = 0;
  double high = term;
  for (double part : parts_) {
    if (std::abs(high) < std::abs(part)) std::swap(high, part);
    const double sum = high + part;
    const double low = part - (sum - high);  // exact, because |high| >= |part|
    if (low != 0) parts_[kept++] = low;
    high = sum;
  }
  parts_.resize(kept);
  if (high != 0) parts_.push_back(high);
}

double ExactSum::rounded() const {
  if (parts_.empty()) return 0;
  size_t left = parts_.size();
  double high = parts_[--left], low = 0;
  while (left > 0 && low == 0) {
    const double part = parts_[--left], before = high;
    high = before + part;
    low = part - (high - before);
  }
  // `high` was rounded to even as if `low` were all that is left. If low is half a unit and what is below it
  // has the same sign, the tie was none: round away.
  if (left > 0 && (low > 0) == (parts_[left - 1] > 0)) {
    const double twice = 2 * low, away = high + twice;
    if (away - high == twice) high = away;
  }
  return high;
}

namespace {

// `term` of an element is a double: exact for elements that are floats, rounded for doubles, which are then added with
// rounding, too.
template <class Term>
double sum_of(const std::vector<at::Tensor>& tensors, const Term& term) {
  ExactSum exact;
  double rounded = 0, not_finite = 0;
  for (const at::Tensor& tensor : tensors) {
    const bool is_double = tensor.scalar_type() == at::kDouble;
    const at::Tensor t = tensor.to(at::kDouble).contiguous();
    const double* data = t.const_data_ptr<double>();
    for (int64_t i = 0; i < t.numel(); ++i) {
      const double value = term(data[i]);
      if (is_double)
        rounded += value;
      else if (!std::isfinite(value))
        not_finite += value;  // inf + NaN is NaN
      else if (value != 0)
        exact.add(value);
    }
  }
  return not_finite == 0 ? exact.rounded() + rounded : not_finite;
}

}  // namespace

double sum_of_squares(const std::vector<at::Tensor>& tensors) {
  return sum_of(tensors, [](double x) { return x * x; });
}

double sum_of_magnitudes(const std::vector<at::Tensor>& tensors) {
  return sum_of(tensors, [](double x) { return std::abs(x); });
}

double largest_magnitude(const std::vector<at::Tensor>& tensors) {
  double largest = 0;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor t = tensor.to(at::kDouble).contiguous();
    const double* data = t.const_data_ptr<double>();
    for (int64_t i = 0; i < t.numel(); ++i)
      if (!(std::abs(data[i]) <= largest)) largest = std::isnan(largest) ? largest : std::abs(data[i]);
  }
  return largest;
}

double norm(const std::vector<at::Tensor>& tensors, double order) {
  if (order == 1) return sum_of_magnitudes(tensors);
  if (order == 2) return std::sqrt(sum_of_squares(tensors));
  return largest_magnitude(tensors);
}

}  // namespace golden
