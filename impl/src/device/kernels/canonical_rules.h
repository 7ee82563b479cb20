// Canonical arithmetic (nn/canonical/canonical.h) as rules: products whose sums are exact, norms of rows, and what a softmax
// does to the elements of rows.
#pragma once

#include <cmath>
#include <limits>

#include "internal/base/fixed_terms.h"
#include "device/kernels/curves.h"
#include "device/kernels/elements.h"
#include "shardproof/device/model_math.h"

namespace shardproof::SHARD_KERNELS {

// One element of the product a pack. With `kChecked` the rule finds the elements that have a term out of range. Otherwise a sum
// takes `terms_of_sum` terms before it goes to integers.
template <bool kChecked>
struct ProductRule {
  static constexpr int kWidth = 1;
  ExactProduct product;
  int64_t terms_of_sum;

  bool fits() const { return false; }
  template <int W>
  SHARD_HD int pack(int64_t i) const {
    static_assert(W == 1);
    const int64_t row = i / product.columns, column = i - row * product.columns;
    if (product.seen && column >= product.seen[row]) {
      if (!product.units) product.out[i] = product.unseen;
      return 1;
    }
    const double* a = product.a + (product.a_transposed ? row : row * product.inner);
    const double* b = product.b + (product.b_transposed ? column * product.inner : column);
    const int64_t a_step = product.a_transposed ? product.rows : 1, b_step = product.b_transposed ? 1 : product.columns;
    const int64_t first = !kChecked && product.first_term ? product.first_term[row] : 0;
    const int64_t last = !kChecked && product.end_term ? product.end_term[row] : product.inner;
    uint64_t sum = 0, beyond = 0;
    for (int64_t begin = first; begin < last; begin += terms_of_sum) {
      const int64_t end = begin + terms_of_sum < last ? begin + terms_of_sum : last;
      double shifted = fixed::kShift;
      for (int64_t k = begin; k < end; ++k) shifted = fma(a[k * a_step], fixed::right_factor(b[k * b_step]), shifted);
      const uint64_t units = fixed::units_of_shifted(shifted);
      sum += units;
      if (kChecked) beyond |= fixed::beyond(units);
    }
    if (product.units)
      product.units[i] = static_cast<int64_t>(static_cast<uint64_t>(product.units[i]) + sum);
    else
      product.out[i] = fixed::value(sum) * product.scale;
    return beyond == 0 ? 1 : 0;
  }
};

// normal = (x - mean) * scale
struct RowScale {
  double mean, scale;
};

// Sums within a row are taken in the order of indices.
SHARD_HD RowScale row_scale(const double* x, const RowNorm& norm) {
  const auto width = static_cast<double>(norm.width);
  RowScale row{0, 0};
  if (norm.centred) {
    for (int64_t j = 0; j < norm.width; ++j) row.mean += x[j];
    row.mean /= width;
  }
  double squares = 0;
  for (int64_t j = 0; j < norm.width; ++j) squares += (x[j] - row.mean) * (x[j] - row.mean);
  row.scale = 1 / sqrt(squares / width + norm.eps);
  return row;
}

// One row a pack. A centred norm has a bias.
struct NormRule {
  static constexpr int kWidth = 1;
  static constexpr bool kComputes = true;
  RowNorm norm;
  const double* bias;
  double* y;

  bool fits() const { return false; }
  template <int W>
  SHARD_HD void pack(int64_t i) const {
    static_assert(W == 1);
    const double* x = norm.x + i * norm.width;
    const RowScale row = row_scale(x, norm);
    for (int64_t j = 0; j < norm.width; ++j) {
      const double scaled = (x[j] - row.mean) * row.scale * norm.weight[j];
      y[i * norm.width + j] = fixed::grid(norm.centred ? scaled + bias[j] : scaled);
    }
  }
};

struct NormBackwardRule {
  static constexpr int kWidth = 1;
  static constexpr bool kComputes = true;
  RowNorm norm;
  const double* dy;
  double *dx, *of_weight;

  bool fits() const { return false; }
  template <int W>
  SHARD_HD void pack(int64_t i) const {
    static_assert(W == 1);
    const int64_t begin = i * norm.width;
    const double *x = norm.x + begin, *above = dy + begin;
    const RowScale row = row_scale(x, norm);
    double sum = 0, weighted = 0;
    for (int64_t j = 0; j < norm.width; ++j) {
      const double normal = (x[j] - row.mean) * row.scale, d = above[j] * norm.weight[j];
      sum += d;
      weighted += d * normal;
      of_weight[begin + j] = above[j] * normal;
    }
    const auto width = static_cast<double>(norm.width);
    const double mean = norm.centred ? sum / width : 0, along = weighted / width;
    for (int64_t j = 0; j < norm.width; ++j) {
      const double normal = (x[j] - row.mean) * row.scale, d = above[j] * norm.weight[j];
      dx[begin + j] = fixed::grid((d - mean - normal * along) * row.scale);
    }
  }
};

// A rule for the elements of rows as one for elements. The CPU goes through rows instead, so that what a row has is read once.
template <class Rule>
struct InRows {
  static constexpr int kWidth = 1;
  static constexpr bool kInRows = true;
  Rule rule;
  SeenOfRows seen;
  int64_t width;

  SHARD_HD int64_t seen_of(int64_t row) const { return seen.count ? seen.count[row % seen.rows] : width; }

  bool fits() const { return false; }
  template <int W>
  SHARD_HD void pack(int64_t i) const {
    static_assert(W == 1);
    const int64_t row = i / width;
    if (i - row * width < seen_of(row))
      rule.element(rule.row(row), i);
    else
      rule.y[i] = 0;
  }
};

template <bool kDivides>
struct PowersRule {
  const double *x, *most, *divisor;
  double* y;

  struct Row {
    double most, divisor;
  };
  SHARD_HD Row row(int64_t r) const {
    constexpr double kLowest = std::numeric_limits<double>::lowest();
    return {most[r] < kLowest ? 0 : most[r], kDivides ? divisor[r] : 1};
  }
  SHARD_HD void element(const Row& row, int64_t i) const {
    const double power = curves::exp(x[i] - row.most);
    y[i] = kDivides ? power / row.divisor : power;
  }
};

struct SlopesRule {
  const double *dy, *mask, *along, *shares;
  double scale;
  double* y;

  SHARD_HD double row(int64_t r) const { return along[r]; }
  SHARD_HD void element(double along, int64_t i) const {
    const double above = mask ? dy[i] * mask[i] : dy[i];
    y[i] = (above - along) * shares[i] * scale;
  }
};

// An exact product on a runner that takes one element a thread.
template <class Runner>
bool product_by_elements(const Runner& run, const ExactProduct& product) {
  const int64_t count = product.rows * product.columns;
  if (!fixed::all_fit(product.largest_term)) return run.first(count, ProductRule<true>{product, 1}) == count;
  run.each(count, ProductRule<false>{product, fixed::terms_of_shifted(product.largest_term)});
  return true;
}

}  // namespace shardproof::SHARD_KERNELS
