// Sums of terms that are rounded to multiples of 2^-40 (base/fixed_terms.h), on tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "internal/base/fixed_terms.h"

namespace shardproof::fixed {

// Of several sums: remembers whether all terms of all of them were in range. The error comes after the last one, since other
// ranks wait for what this rank sends in between.
class Terms {
 public:
  void note(bool fit) { fit_ &= fit; }
  // Throws NonFiniteError naming what was computed.
  void require_fit(const std::string& what) const;

 private:
  bool fit_ = true;
};

// Of a contiguous float64 tensor; NaN where there is one, and 0 of nothing. On a device, the host waits for the answer.
double largest_magnitude(const at::Tensor& x);

// The functions below work where their tensors are: LibTorch's operators on single elements, each of which is one IEEE
// operation, and the device's own arithmetic (model_math.h). So they have the same bits on every device.

// Each element's nearest multiple; never -0. Contiguous.
at::Tensor grid(const at::Tensor& x);

// A matrix, or matrices of the last two dims, as exact products take it: as it lies, where it or its transpose is contiguous.
struct Operand {
  at::Tensor memory;  // float64, contiguous
  bool transposed = false;
  double magnitude;  // the largest one

  Operand(const at::Tensor& matrix, const std::string& what);
  // Where its magnitude is known.
  Operand(const at::Tensor& matrix, const std::string& what, double magnitude);

  int64_t rows() const { return memory.size(transposed ? -1 : -2); }
  int64_t columns() const { return memory.size(transposed ? -2 : -1); }
  Operand turned() const;  // the transpose
};

// Throws Error.
void require_terms(int64_t count, const std::string& what);

// a [rows, n] times b [n, columns], both float64. A row of the result depends on one row of a, so any cut of the rows gives the
// same bits.
at::Tensor product(const Operand& a, const Operand& b, const std::string& what);
at::Tensor product(const at::Tensor& a, const at::Tensor& b, const std::string& what);
// The same in the contiguous memory of `out` [rows, columns].
void product_into(const at::Tensor& out, const Operand& a, const Operand& b, const std::string& what);
// x [rows, n] -> [n].
at::Tensor sum_of_rows(const at::Tensor& x, const std::string& what);
// Adds the sum of each row of x [.., n] to `units` [..], in units. Both are contiguous, and the magnitude of x is given.
// Returns whether all terms were in range.
bool add_row_sums(const at::Tensor& units, const at::Tensor& x, double magnitude);

// Between float64 that holds multiples of the unit and int64 in units, for sums over ranks.
at::Tensor to_units(const at::Tensor& values, const std::string& what);
at::Tensor from_units(const at::Tensor& units);
// The same of terms, which are rounded.
at::Tensor units_of_terms(const at::Tensor& terms, const std::string& what);

// Throws Error unless it is float64; contiguous.
at::Tensor require_double(const at::Tensor& x, const std::string& what);

}  // namespace shardproof::fixed
