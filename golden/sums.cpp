#include "golden/sums.h"

#include <ATen/ATen.h>

#include <cmath>

namespace golden {

void accumulate(Tensors& sum, const Tensors& terms, at::ScalarType dtype) {
  if (sum.empty()) {
    for (const at::Tensor& term : terms)
      sum.push_back(term.to(dtype, /*non_blocking=*/false, /*copy=*/true, at::MemoryFormat::Contiguous));
    return;
  }
  for (size_t i = 0; i < terms.size(); ++i) sum[i].add_(terms[i].to(dtype));
}

void Reduction::add(const Tensors& local) {
  if (ranks_ == 1) return accumulate(sum_, local, precision_.gradient);
  Tensors wire;
  for (const at::Tensor& t : local) wire.push_back(t.to(precision_.reduce));
  accumulate(sum_, wire, precision_.float32_sums ? at::kFloat : precision_.reduce);
}

Tensors Reduction::result() const {
  if (ranks_ == 1) return sum_;
  Tensors result;
  for (const at::Tensor& t : sum_) result.push_back(t.to(precision_.reduce).to(precision_.gradient));
  return result;
}

namespace {

constexpr double kUnit = 0x1p-44;
constexpr double kTermMax = 0x1p62;  // in units; anything above is no number that could be added

}  // namespace

void CanonicalSum::add(const Tensors& gradients) {
  if (integers_.empty())
    for (const at::Tensor& g : gradients) {
      integers_.push_back(at::zeros(g.sizes(), at::kLong));
      lost_.push_back(at::zeros(g.sizes(), at::kBool));
    }
  for (size_t p = 0; p < gradients.size(); ++p) {
    const at::Tensor values = gradients[p].to(at::kDouble).contiguous();
    const double* value = values.const_data_ptr<double>();
    int64_t* sum = integers_[p].mutable_data_ptr<int64_t>();
    bool* lost = lost_[p].mutable_data_ptr<bool>();
    for (int64_t i = 0; i < values.numel(); ++i) {
      const double units = value[i] / kUnit;  // exact
      // NaN fails both comparisons. nearbyint rounds half to even.
      const bool fits = std::abs(units) < kTermMax;
      if (!fits || __builtin_add_overflow(sum[i], static_cast<int64_t>(std::nearbyint(units)), &sum[i])) lost[i] = true;
    }
  }
}

Tensors CanonicalSum::result() const {
  Tensors result;
  for (size_t p = 0; p < integers_.size(); ++p) {
    const at::Tensor rounded = at::empty(integers_[p].sizes(), at::kFloat);
    const int64_t* sum = integers_[p].const_data_ptr<int64_t>();
    const bool* lost = lost_[p].const_data_ptr<bool>();
    float* out = rounded.mutable_data_ptr<float>();
    for (int64_t i = 0; i < rounded.numel(); ++i)
      out[i] = lost[i] ? NAN : static_cast<float>(sum[i]) * static_cast<float>(kUnit);
    result.push_back(rounded);
  }
  return result;
}

}  // namespace golden
