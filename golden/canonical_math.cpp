#include "golden/canonical_math.h"

#include <bit>
#include <cmath>
#include <limits>

#include "golden/curves.h"

namespace golden::exact {
namespace {

constexpr double kPerUnit = 1099511627776.0;  // 2^40

double curve_at(double x, Curve kind) {
  switch (kind) {
    case Curve::identity:
      return x;
    case Curve::relu:
      return x > 0 ? x : 0;
    case Curve::tanh:
      return tanh(x);
    case Curve::gelu:
      return x * normal_below(x);
    case Curve::silu:
      return x / (1 + exp(-x));
  }
  return NAN;
}

double slope_at(double x, Curve kind) {
  switch (kind) {
    case Curve::identity:
      return 1;
    case Curve::relu:
      return x > 0 ? 1 : 0;
    case Curve::tanh:
      return 1 - tanh(x) * tanh(x);
    case Curve::gelu:
      return normal_below(x) + x * (exp(-0.5 * x * x) * 0.3989422804014327);
    case Curve::silu: {
      const double share = 1 / (1 + exp(-x));
      return share * (1 + x * (1 - share));
    }
  }
  return NAN;
}

double root_scale(const Matrix& x, int64_t row, double eps) {
  double squares = 0;
  for (int64_t j = 0; j < x.columns; ++j) squares += x.at(row, j) * x.at(row, j);
  return 1 / std::sqrt(squares / static_cast<double>(x.columns) + eps);
}

struct Statistics {
  double mean, scale;
};

Statistics statistics(const Matrix& x, int64_t row, double eps) {
  double mean = 0, squares = 0;
  for (int64_t j = 0; j < x.columns; ++j) mean += x.at(row, j);
  mean /= static_cast<double>(x.columns);
  for (int64_t j = 0; j < x.columns; ++j) squares += (x.at(row, j) - mean) * (x.at(row, j) - mean);
  return {mean, 1 / std::sqrt(squares / static_cast<double>(x.columns) + eps)};
}

}  // namespace

double rounded(double x) {
  return std::nearbyint(x * kPerUnit) / kPerUnit + 0.0;
}

void Sum::add(double term) {
  add_product(1, term);
}

// Doubles from 4096 to 8192 are the multiples of 2^-40, so a sum that lies there is rounded to one of them.
void Sum::add_product(double x, double y) {
  const double factor = std::bit_cast<double>(std::bit_cast<uint64_t>(y) | 1);
  add_units((std::fma(x, factor, 6144.0) - 6144.0) * kPerUnit);
}

void Sum::add_units(double units) {
  if (units >= -128 * kPerUnit && units < 128 * kPerUnit)
    units_ += static_cast<int64_t>(units);
  else
    lost_ = true;
}

double Sum::value() const {
  return lost_ ? std::numeric_limits<double>::quiet_NaN() : static_cast<double>(units_) / kPerUnit;
}

Matrix linear(const Matrix& x, const Matrix& weight, const Matrix& bias) {
  Matrix y(x.rows, weight.rows);
  for (int64_t i = 0; i < x.rows; ++i)
    for (int64_t o = 0; o < weight.rows; ++o) {
      Sum sum;
      for (int64_t k = 0; k < x.columns; ++k) sum.add_product(x.at(i, k), weight.at(o, k));
      y.at(i, o) = bias.rows > 0 ? sum.value() + rounded(bias.at(0, o)) : sum.value();
    }
  return y;
}

LinearGradients linear_backward(const Matrix& x, const Matrix& weight, const Matrix& dy) {
  LinearGradients result{Matrix(x.rows, x.columns), Matrix(weight.rows, weight.columns), Matrix(1, weight.rows)};
  for (int64_t i = 0; i < x.rows; ++i)
    for (int64_t k = 0; k < x.columns; ++k) {
      Sum sum;
      for (int64_t o = 0; o < weight.rows; ++o) sum.add_product(dy.at(i, o), weight.at(o, k));
      result.x.at(i, k) = sum.value();
    }
  for (int64_t o = 0; o < weight.rows; ++o) {
    Sum bias;
    for (int64_t i = 0; i < x.rows; ++i) bias.add(dy.at(i, o));
    result.bias.at(0, o) = bias.value();
    for (int64_t k = 0; k < x.columns; ++k) {
      Sum sum;
      for (int64_t i = 0; i < x.rows; ++i) sum.add_product(dy.at(i, o), x.at(i, k));
      result.weight.at(o, k) = sum.value();
    }
  }
  return result;
}

Matrix layer_norm(const Matrix& x, const Matrix& weight, const Matrix& bias, double eps) {
  Matrix y(x.rows, x.columns);
  for (int64_t i = 0; i < x.rows; ++i) {
    const Statistics s = statistics(x, i, eps);
    for (int64_t j = 0; j < x.columns; ++j)
      y.at(i, j) = rounded((x.at(i, j) - s.mean) * s.scale * weight.at(0, j) + bias.at(0, j));
  }
  return y;
}

LinearGradients layer_norm_backward(const Matrix& x, const Matrix& weight, const Matrix& dy, double eps) {
  LinearGradients result{Matrix(x.rows, x.columns), Matrix(1, x.columns), Matrix(1, x.columns)};
  std::vector<Sum> weights(static_cast<size_t>(x.columns)), biases(weights);
  const auto width = static_cast<double>(x.columns);
  for (int64_t i = 0; i < x.rows; ++i) {
    const Statistics s = statistics(x, i, eps);
    std::vector<double> normal, d;
    double sum = 0, along = 0;
    for (int64_t j = 0; j < x.columns; ++j) {
      normal.push_back((x.at(i, j) - s.mean) * s.scale);
      d.push_back(dy.at(i, j) * weight.at(0, j));
      sum += d.back();
      along += d.back() * normal.back();
      weights[static_cast<size_t>(j)].add(dy.at(i, j) * normal.back());
      biases[static_cast<size_t>(j)].add(dy.at(i, j));
    }
    for (int64_t j = 0; j < x.columns; ++j) {
      const auto at = static_cast<size_t>(j);
      result.x.at(i, j) = rounded((d[at] - sum / width - normal[at] * (along / width)) * s.scale);
    }
  }
  for (int64_t j = 0; j < x.columns; ++j) {
    result.weight.at(0, j) = weights[static_cast<size_t>(j)].value();
    result.bias.at(0, j) = biases[static_cast<size_t>(j)].value();
  }
  return result;
}

Matrix rms_norm(const Matrix& x, const Matrix& weight, double eps) {
  Matrix y(x.rows, x.columns);
  for (int64_t i = 0; i < x.rows; ++i) {
    const double scale = root_scale(x, i, eps);
    for (int64_t j = 0; j < x.columns; ++j) y.at(i, j) = rounded(x.at(i, j) * scale * weight.at(0, j));
  }
  return y;
}

LinearGradients rms_norm_backward(const Matrix& x, const Matrix& weight, const Matrix& dy, double eps) {
  LinearGradients result{Matrix(x.rows, x.columns), Matrix(1, x.columns), Matrix()};
  std::vector<Sum> weights(static_cast<size_t>(x.columns));
  for (int64_t i = 0; i < x.rows; ++i) {
    const double scale = root_scale(x, i, eps);
    double along = 0;
    for (int64_t j = 0; j < x.columns; ++j) {
      const double normal = x.at(i, j) * scale;
      along += dy.at(i, j) * weight.at(0, j) * normal;
      weights[static_cast<size_t>(j)].add(dy.at(i, j) * normal);
    }
    along /= static_cast<double>(x.columns);
    for (int64_t j = 0; j < x.columns; ++j)
      result.x.at(i, j) = rounded((dy.at(i, j) * weight.at(0, j) - x.at(i, j) * scale * along) * scale);
  }
  for (int64_t j = 0; j < x.columns; ++j) result.weight.at(0, j) = weights[static_cast<size_t>(j)].value();
  return result;
}

Matrix curve(const Matrix& x, Curve kind) {
  if (kind == Curve::identity) return x;
  Matrix y = x;
  for (double& value : y.values) value = rounded(curve_at(value, kind));
  return y;
}

Matrix curve_backward(const Matrix& x, const Matrix& dy, Curve kind) {
  if (kind == Curve::identity) return dy;
  Matrix dx = x;
  for (size_t i = 0; i < dx.values.size(); ++i) dx.values[i] = rounded(dy.values[i] * slope_at(x.values[i], kind));
  return dx;
}

Matrix times(const Matrix& x, const std::vector<double>& factors) {
  if (factors.empty()) return x;
  Matrix y = x;
  for (size_t i = 0; i < y.values.size(); ++i) y.values[i] = rounded(x.values[i] * factors[i]);
  return y;
}

Matrix operator+(const Matrix& a, const Matrix& b) {
  Matrix sum = a;
  for (size_t i = 0; i < sum.values.size(); ++i) sum.values[i] += b.values[i];
  return sum;
}

}  // namespace golden::exact
