// Sums of terms that are rounded to multiples of 2^-40 (base/fixed_terms.h), on tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cmath>
#include <cstdint>
#include <string>

#include "base/fixed_terms.h"

namespace shardproof::fixed {

// Of one kind of sum: remembers whether any term was out of range.
class Terms {
 public:
  uint64_t units(double term) {
    const uint64_t rounded = fixed::units(term);
    beyond_ |= fixed::beyond(rounded);
    return rounded;
  }
  // Of a value that is a multiple already.
  int64_t exact_units(double value) {
    const bool fits = std::abs(value) < kTotalMax;  // false for NaN
    beyond_ |= !fits;
    return fits ? static_cast<int64_t>(std::nearbyint(value * kUnits)) : 0;
  }
  bool fit() const { return beyond_ == 0; }
  // Throws NonFiniteError naming what was computed.
  void require_fit(const std::string& what) const;

 private:
  uint64_t beyond_ = 0;
};

// The functions below work where their tensors are: LibTorch's operators on single elements, each of which is one IEEE
// operation, and the device's exact products (model_math.h). So they have the same bits on every device.

// Each element's nearest multiple; never -0.
at::Tensor grid(const at::Tensor& x);

// Throws Error.
void require_terms(int64_t count, const std::string& what);

// a [rows, n] times b [n, columns], both float64.
at::Tensor product(const at::Tensor& a, const at::Tensor& b, const std::string& what);
// x [rows, n] -> [n].
at::Tensor sum_of_rows(const at::Tensor& x, const std::string& what);

// Between float64 that holds multiples of the unit and int64 in units, for sums over ranks.
at::Tensor to_units(const at::Tensor& values, const std::string& what);
at::Tensor from_units(const at::Tensor& units);
// The same of terms, which are rounded.
at::Tensor units_of_terms(const at::Tensor& terms, const std::string& what);

// Throws Error unless it is float64; contiguous.
at::Tensor require_double(const at::Tensor& x, const std::string& what);
// The same, and throws Error unless it is on the CPU. For operators that call functions of the C library, such as exp, whose
// bits a device has no functions for.
at::Tensor require_host(const at::Tensor& x, const std::string& what);

}  // namespace shardproof::fixed
