// The gradient norm, independent of order and of how tensors are cut.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace golden {

// A sum of doubles without rounding, kept as a list of doubles that do not overlap (Shewchuk 1997, as
// Python's math.fsum). Terms must be finite, and so must every sum of some of them.
class ExactSum {
 public:
  void add(double term);
  // The double nearest to the exact sum, ties to even.
  double rounded() const;

 private:
  std::vector<double> parts_;  // by increasing magnitude, none zero
};

// Sum of the squares of all elements.
//   float32  the exact sum rounded once to double (a square of a float32 is exact in double): the same for every order
//   float64  sums of products in double, good to some units in the last place: those runs are compared within tolerance
// NaN if any element is NaN, otherwise infinite if any is infinite.
double sum_of_squares(const std::vector<at::Tensor>& tensors);
// The same of magnitudes.
double sum_of_magnitudes(const std::vector<at::Tensor>& tensors);
// 0 of no elements; NaN if any element is NaN.
double largest_magnitude(const std::vector<at::Tensor>& tensors);

// `order` 1, 2 or infinity: one of the above, and the square root of the first one.
double norm(const std::vector<at::Tensor>& tensors, double order = 2);

}  // namespace golden
