// Exact products on the CPU, a row at a time: the sums of a row stay in the cache, and the loop over its columns vectorises.
#pragma once

#include <algorithm>
#include <vector>

#include "base/fixed_terms.h"
#include "shardproof/device/model_math.h"

namespace shardproof::cpu_product {

// sums[j] += the units of sum over k of x[k] y[k, j], plus kShiftBits a term, for the first `count` columns. Ranges are not
// looked at.
[[gnu::always_inline]] inline void add_terms(uint64_t* sums, const double* x, const double* y, int64_t inner, int64_t columns,
                                             int64_t count) {
  using fixed::shifted_units;
  int64_t k = 0;
  for (; k + 4 <= inner; k += 4) {
    const double *row0 = y + k * columns, *row1 = row0 + columns, *row2 = row1 + columns, *row3 = row2 + columns;
    const double x0 = x[k], x1 = x[k + 1], x2 = x[k + 2], x3 = x[k + 3];
    for (int64_t j = 0; j < count; ++j)
      sums[j] += shifted_units(x0 * row0[j]) + shifted_units(x1 * row1[j]) + shifted_units(x2 * row2[j]) +
                 shifted_units(x3 * row3[j]);
  }
  for (; k < inner; ++k)
    for (int64_t j = 0; j < count; ++j) sums[j] += shifted_units(x[k] * y[k * columns + j]);
}

using AddTerms = void (*)(uint64_t*, const double*, const double*, int64_t, int64_t, int64_t);

inline void add_terms_anywhere(uint64_t* sums, const double* x, const double* y, int64_t inner, int64_t columns,
                               int64_t count) {
  add_terms(sums, x, y, inner, columns, count);
}
#if defined(__x86_64__)
// Without fused multiplication and addition, so of the same bits.
[[gnu::target("avx2")]] inline void add_terms_avx2(uint64_t* sums, const double* x, const double* y, int64_t inner,
                                                   int64_t columns, int64_t count) {
  add_terms(sums, x, y, inner, columns, count);
}
inline const AddTerms kAddTerms = __builtin_cpu_supports("avx2") ? add_terms_avx2 : add_terms_anywhere;
#else
inline const AddTerms kAddTerms = add_terms_anywhere;
#endif

// The same with a look at each term. Not zero when one is out of range.
inline uint64_t add_checked_terms(uint64_t* sums, const double* x, const double* y, int64_t inner, int64_t columns,
                                  int64_t count) {
  uint64_t beyond = 0;
  for (int64_t k = 0; k < inner; ++k)
    for (int64_t j = 0; j < count; ++j) {
      const uint64_t term = fixed::units(x[k] * y[k * columns + j]);
      beyond |= fixed::beyond(term);
      sums[j] += term;
    }
  return beyond;
}

inline void store(const ExactProduct& p, int64_t row, const uint64_t* sums, int64_t count) {
  if (p.units) {
    int64_t* units = p.units + row * p.columns;
    for (int64_t j = 0; j < count; ++j) units[j] = static_cast<int64_t>(static_cast<uint64_t>(units[j]) + sums[j]);
    return;
  }
  double* out = p.out + row * p.columns;
  for (int64_t j = 0; j < count; ++j) out[j] = fixed::value(sums[j]);
  std::fill(out + count, out + p.columns, 0.0);
}

inline bool run(const ExactProduct& p, bool check) {
  std::vector<uint64_t> sums(static_cast<size_t>(p.columns));
  uint64_t beyond = 0;
  for (int64_t i = 0; i < p.rows; ++i) {
    const double* x = p.a + i * p.inner;
    const int64_t count = p.seen ? std::min(p.seen[i], p.columns) : p.columns;
    std::fill(sums.begin(), sums.end(), check ? 0 : -(static_cast<uint64_t>(p.inner) * fixed::kShiftBits));
    if (check)
      beyond |= add_checked_terms(sums.data(), x, p.b, p.inner, p.columns, count);
    else
      kAddTerms(sums.data(), x, p.b, p.inner, p.columns, count);
    store(p, i, sums.data(), count);
  }
  return beyond == 0;
}

}  // namespace shardproof::cpu_product
