// Exact products on the CPU, a row at a time: the sums of a row stay in the cache, and the loop over its columns vectorises.
#pragma once

#include <algorithm>
#include <vector>

#include "base/fixed_terms.h"
#include "shardproof/device/model_math.h"

namespace shardproof::cpu_product {

// sums[j] += the units of sum over k of x[k] y[k, j], plus kShiftBits a term. Ranges are not looked at.
[[gnu::always_inline]] inline void add_terms(uint64_t* sums, const double* x, const double* y, int64_t inner, int64_t columns) {
  using fixed::shifted_units;
  int64_t k = 0;
  for (; k + 4 <= inner; k += 4) {
    const double *row0 = y + k * columns, *row1 = row0 + columns, *row2 = row1 + columns, *row3 = row2 + columns;
    const double x0 = x[k], x1 = x[k + 1], x2 = x[k + 2], x3 = x[k + 3];
    for (int64_t j = 0; j < columns; ++j)
      sums[j] += shifted_units(x0 * row0[j]) + shifted_units(x1 * row1[j]) + shifted_units(x2 * row2[j]) +
                 shifted_units(x3 * row3[j]);
  }
  for (; k < inner; ++k)
    for (int64_t j = 0; j < columns; ++j) sums[j] += shifted_units(x[k] * y[k * columns + j]);
}

using AddTerms = void (*)(uint64_t*, const double*, const double*, int64_t, int64_t);

inline void add_terms_anywhere(uint64_t* sums, const double* x, const double* y, int64_t inner, int64_t columns) {
  add_terms(sums, x, y, inner, columns);
}
#if defined(__x86_64__)
// Without fused multiplication and addition, so of the same bits.
[[gnu::target("avx2")]] inline void add_terms_avx2(uint64_t* sums, const double* x, const double* y, int64_t inner,
                                                   int64_t columns) {
  add_terms(sums, x, y, inner, columns);
}
inline const AddTerms kAddTerms = __builtin_cpu_supports("avx2") ? add_terms_avx2 : add_terms_anywhere;
#else
inline const AddTerms kAddTerms = add_terms_anywhere;
#endif

inline bool run(const ExactProduct& p, bool check) {
  std::vector<uint64_t> sums(static_cast<size_t>(p.columns));
  uint64_t beyond = 0;
  for (int64_t i = 0; i < p.rows; ++i) {
    std::fill(sums.begin(), sums.end(), check ? 0 : -(static_cast<uint64_t>(p.inner) * fixed::kShiftBits));
    const double* x = p.a + i * p.inner;
    if (!check) kAddTerms(sums.data(), x, p.b, p.inner, p.columns);
    for (int64_t k = 0; k < p.inner && check; ++k)
      for (int64_t j = 0; j < p.columns; ++j) {
        const uint64_t term = fixed::units(x[k] * p.b[k * p.columns + j]);
        beyond |= fixed::beyond(term);
        sums[static_cast<size_t>(j)] += term;
      }
    for (int64_t j = 0; j < p.columns; ++j) p.out[i * p.columns + j] = fixed::value(sums[static_cast<size_t>(j)]);
  }
  return beyond == 0;
}

}  // namespace shardproof::cpu_product
