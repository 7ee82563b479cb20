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

double sum_of_squares_double(const std::vector<at::Tensor>& tensors) {
  double sum = 0;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor t = tensor.contiguous();
    const double* data = t.const_data_ptr<double>();
    for (int64_t i = 0; i < t.numel(); ++i) sum += data[i] * data[i];
  }
  return sum;
}

}  // namespace

double sum_of_squares(const std::vector<at::Tensor>& tensors) {
  if (!tensors.empty() && tensors.front().scalar_type() == at::kDouble) return sum_of_squares_double(tensors);
  ExactSum sum;
  double not_finite = 0;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor t = tensor.contiguous();
    const float* data = t.const_data_ptr<float>();
    for (int64_t i = 0; i < t.numel(); ++i) {
      const double square = static_cast<double>(data[i]) * data[i];
      if (!std::isfinite(square))
        not_finite += square;  // inf + NaN is NaN
      else if (square != 0)
        sum.add(square);
    }
  }
  return not_finite == 0 ? sum.rounded() : not_finite;
}

}  // namespace golden
