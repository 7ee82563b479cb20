// Canonical arithmetic by plain loops: sums of terms rounded to multiples of 2^-40. See Model::canonical in golden.h.
#pragma once

#include <cstdint>
#include <vector>

namespace golden::exact {

// The multiple of 2^-40 nearest to x, ties to even; never -0.
double rounded(double x);

// The exact sum of rounded terms, rounded once to double; NaN once a rounded term is not in [-128, 128).
class Sum {
 public:
  // As the product of 1 by it.
  void add(double term);
  // The last bit of y is set, and the exact product with x is rounded to the nearest multiple, once.
  void add_product(double x, double y);
  double value() const;

 private:
  void add_units(double units);

  int64_t units_ = 0;
  bool lost_ = false;
};

struct Matrix {
  int64_t rows = 0, columns = 0;
  std::vector<double> values;
  Matrix() = default;
  Matrix(int64_t r, int64_t c) : rows(r), columns(c), values(static_cast<size_t>(r * c)) {}
  double& at(int64_t i, int64_t j) { return values[static_cast<size_t>(i * columns + j)]; }
  double at(int64_t i, int64_t j) const { return values[static_cast<size_t>(i * columns + j)]; }
};

// x [rows, in], weight [out, in], bias [1, out] or of no rows.
Matrix linear(const Matrix& x, const Matrix& weight, const Matrix& bias);
struct LinearGradients {
  Matrix x, weight, bias;
};
LinearGradients linear_backward(const Matrix& x, const Matrix& weight, const Matrix& dy);

Matrix layer_norm(const Matrix& x, const Matrix& weight, const Matrix& bias, double eps);
LinearGradients layer_norm_backward(const Matrix& x, const Matrix& weight, const Matrix& dy, double eps);

Matrix rms_norm(const Matrix& x, const Matrix& weight, double eps);
LinearGradients rms_norm_backward(const Matrix& x, const Matrix& weight, const Matrix& dy, double eps);  // no bias

enum class Curve { identity, relu, tanh, gelu, silu };
Matrix curve(const Matrix& x, Curve kind);
Matrix curve_backward(const Matrix& x, const Matrix& dy, Curve kind);

// Element by element, rounded; x itself when there are no factors.
Matrix times(const Matrix& x, const std::vector<double>& factors);

// Plain addition.
Matrix operator+(const Matrix& a, const Matrix& b);

}  // namespace golden::exact
