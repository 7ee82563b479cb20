// Tiles of exact products: the sums of a few rows and columns stay in registers, so that what is loaded serves several terms.
// There is one struct for each set of instructions, and all have the same bits, since a term is rounded once everywhere.
#pragma once

#include <cstdint>

#include "base/fixed_terms.h"
#include "device/kernels/instructions.h"

#ifdef SHARD_X86
#  include <immintrin.h>
#endif

namespace shardproof::cpu_product {

// The sums [rows, kColumns] of some rows of the left side times a panel [inner, kColumns] of the right side: of each term the
// bits, which contain kShiftBits. Term k of row r is left[r * row_step + k * step].
using AddTile = void(uint64_t* sums, const double* left, int64_t row_step, int64_t step, int64_t inner, const double* panel);

struct TilesAnywhere {
  static constexpr int kRows = 1, kColumns = 8;

  template <int R>
  static void add(uint64_t* sums, const double* left, int64_t row_step, int64_t step, int64_t inner, const double* panel) {
    for (int j = 0; j < kColumns; ++j) sums[j] = 0;
    for (int64_t k = 0; k < inner; ++k)
      for (int j = 0; j < kColumns; ++j) sums[j] += fixed::shifted_product(left[k * step], panel[k * kColumns + j]);
  }
};

#ifdef SHARD_X86
struct TilesAvx2 {
  static constexpr int kRows = 4, kVectors = 2, kColumns = 4 * kVectors;

  template <int R>
  [[SHARD_AVX2]] static void add(uint64_t* sums, const double* left, int64_t row_step, int64_t step, int64_t inner,
                                 const double* panel) {
    const __m256d shift = _mm256_set1_pd(fixed::kShift);
    __m256i all[R][kVectors] = {};
    for (int64_t k = 0; k < inner; ++k)
      for (int r = 0; r < R; ++r) {
        const __m256d one = _mm256_set1_pd(left[r * row_step + k * step]);
        for (int v = 0; v < kVectors; ++v) {
          const __m256d others = _mm256_loadu_pd(panel + k * kColumns + 4 * v);
          all[r][v] = _mm256_add_epi64(all[r][v], _mm256_castpd_si256(_mm256_fmadd_pd(one, others, shift)));
        }
      }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVectors; ++v)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(sums + r * kColumns + 4 * v), all[r][v]);
  }
};

struct TilesAvx512 {
  static constexpr int kRows = 8, kVectors = 2, kColumns = 8 * kVectors;

  template <int R>
  [[SHARD_AVX512]] static void add(uint64_t* sums, const double* left, int64_t row_step, int64_t step, int64_t inner,
                                   const double* panel) {
    const __m512d shift = _mm512_set1_pd(fixed::kShift);
    __m512i all[R][kVectors] = {};
    for (int64_t k = 0; k < inner; ++k)
      for (int r = 0; r < R; ++r) {
        const __m512d one = _mm512_set1_pd(left[r * row_step + k * step]);
        for (int v = 0; v < kVectors; ++v) {
          const __m512d others = _mm512_loadu_pd(panel + k * kColumns + 8 * v);
          all[r][v] = _mm512_add_epi64(all[r][v], _mm512_castpd_si512(_mm512_fmadd_pd(one, others, shift)));
        }
      }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < kVectors; ++v) _mm512_storeu_si512(sums + r * kColumns + 8 * v, all[r][v]);
  }
};
#endif

}  // namespace shardproof::cpu_product
