// Tiles of exact products: the sums of a few rows and columns stay in registers, so that what is loaded serves several terms.
// There is one struct for each set of instructions. All have the same bits: a term is rounded once everywhere, and since none
// is half-way between two multiples, it does not matter what it is added to.
#pragma once

#include <cstdint>

#include "internal/base/fixed_terms.h"
#include "device/kernels/instructions.h"

#ifdef SHARD_X86
#  include <immintrin.h>
#endif

namespace shardproof::cpu_product {

// Adds to the sums [rows, V * kWidth], in units, some rows of the left side times a panel [inner, V * kWidth] of right factors.
// Fresh sums hold anything, and count as 0. Term k of row r is left[r * row_step + k * step]. No sum of such terms may be 2,048
// or more.
using AddTile = void(uint64_t* sums, bool fresh, const double* left, int64_t row_step, int64_t step, int64_t inner,
                     const double* panel);

// A struct has tiles of 1 to kRows rows, and of 1 to kVectors vectors of kWidth columns. `turn_factors` transposes kWidth rows
// of as many numbers, and makes right factors of them.
struct TilesAnywhere {
  static constexpr int kRows = 1, kVectors = 1, kWidth = 8;

  template <int R, int V>
  static void add(uint64_t* sums, bool fresh, const double* left, int64_t, int64_t step, int64_t inner, const double* panel) {
    double all[kWidth];
    for (double& sum : all) sum = fixed::kShift;
    for (int64_t k = 0; k < inner; ++k)
      for (int j = 0; j < kWidth; ++j) all[j] = fma(left[k * step], panel[k * kWidth + j], all[j]);
    for (int j = 0; j < kWidth; ++j) sums[j] = (fresh ? 0 : sums[j]) + fixed::units_of_shifted(all[j]);
  }

  static void turn_factors(const double* from, int64_t from_step, double* to, int64_t to_step) {
    for (int row = 0; row < kWidth; ++row)
      for (int k = 0; k < kWidth; ++k) to[k * to_step + row] = fixed::right_factor(from[row * from_step + k]);
  }
};

#ifdef SHARD_X86
struct TilesAvx2 {
  static constexpr int kRows = 4, kVectors = 3, kWidth = 4;

  template <int R, int V>
  [[SHARD_AVX2]] static void add(uint64_t* sums, bool fresh, const double* left, int64_t row_step, int64_t step, int64_t inner,
                                 const double* panel) {
    __m256d all[R][V];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) all[r][v] = _mm256_set1_pd(fixed::kShift);
    for (int64_t k = 0; k < inner; ++k, panel += V * kWidth) {
      __m256d factors[V];
      for (int v = 0; v < V; ++v) factors[v] = _mm256_loadu_pd(panel + v * kWidth);
      for (int r = 0; r < R; ++r) {
        const __m256d one = _mm256_set1_pd(left[r * row_step + k * step]);
        for (int v = 0; v < V; ++v) all[r][v] = _mm256_fmadd_pd(one, factors[v], all[r][v]);
      }
    }
    const __m256i shift = _mm256_set1_epi64x(static_cast<int64_t>(fixed::kShiftBits)), old = _mm256_set1_epi64x(fresh ? 0 : -1);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) {
        auto* at = reinterpret_cast<__m256i*>(sums + (r * V + v) * kWidth);
        _mm256_storeu_si256(at, _mm256_add_epi64(_mm256_and_si256(_mm256_loadu_si256(at), old),
                                                 _mm256_sub_epi64(_mm256_castpd_si256(all[r][v]), shift)));
      }
  }

  [[SHARD_AVX2]] static void turn_factors(const double* from, int64_t from_step, double* to, int64_t to_step) {
    const __m256d a = _mm256_loadu_pd(from), b = _mm256_loadu_pd(from + from_step), c = _mm256_loadu_pd(from + 2 * from_step),
                  d = _mm256_loadu_pd(from + 3 * from_step);
    const __m256d ab0 = _mm256_unpacklo_pd(a, b), ab1 = _mm256_unpackhi_pd(a, b);  // elements 0 and 2, and 1 and 3, of a and b
    const __m256d cd0 = _mm256_unpacklo_pd(c, d), cd1 = _mm256_unpackhi_pd(c, d);
    _mm256_storeu_pd(to, factors(_mm256_permute2f128_pd(ab0, cd0, 0x20)));
    _mm256_storeu_pd(to + to_step, factors(_mm256_permute2f128_pd(ab1, cd1, 0x20)));
    _mm256_storeu_pd(to + 2 * to_step, factors(_mm256_permute2f128_pd(ab0, cd0, 0x31)));
    _mm256_storeu_pd(to + 3 * to_step, factors(_mm256_permute2f128_pd(ab1, cd1, 0x31)));
  }
  // As right_factor.
  [[SHARD_AVX2]] static __m256d factors(__m256d numbers) {
    const __m256i bits = _mm256_castpd_si256(numbers), one = _mm256_set1_epi64x(1);
    const __m256i zero = _mm256_cmpeq_epi64(_mm256_slli_epi64(bits, 1), _mm256_setzero_si256());
    return _mm256_castsi256_pd(_mm256_or_si256(bits, _mm256_andnot_si256(zero, one)));
  }
};

struct TilesAvx512 {
  static constexpr int kRows = 8, kVectors = 3, kWidth = 8;

  template <int R, int V>
  [[SHARD_AVX512]] static void add(uint64_t* sums, bool fresh, const double* left, int64_t row_step, int64_t step,
                                   int64_t inner, const double* panel) {
    __m512d all[R][V];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) all[r][v] = _mm512_set1_pd(fixed::kShift);
    for (int64_t k = 0; k < inner; ++k, panel += V * kWidth) {
      __m512d factors[V];
      for (int v = 0; v < V; ++v) factors[v] = _mm512_loadu_pd(panel + v * kWidth);
      for (int r = 0; r < R; ++r) {
        const __m512d one = _mm512_set1_pd(left[r * row_step + k * step]);
        for (int v = 0; v < V; ++v) all[r][v] = _mm512_fmadd_pd(one, factors[v], all[r][v]);
      }
    }
    const __m512i shift = _mm512_set1_epi64(static_cast<int64_t>(fixed::kShiftBits));
    const __mmask8 old = fresh ? 0 : 0xff;
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) {
        uint64_t* at = sums + (r * V + v) * kWidth;
        _mm512_storeu_si512(
            at, _mm512_add_epi64(_mm512_maskz_loadu_epi64(old, at), _mm512_sub_epi64(_mm512_castpd_si512(all[r][v]), shift)));
      }
  }

  [[SHARD_AVX512]] static void turn_factors(const double* from, int64_t from_step, double* to, int64_t to_step) {
    __m512d pairs[kWidth];  // of rows 2 p and 2 p + 1: the even elements in pairs[2 p], the odd ones in pairs[2 p + 1]
    for (int p = 0; p < kWidth; p += 2) {
      const __m512d one = _mm512_loadu_pd(from + p * from_step), other = _mm512_loadu_pd(from + (p + 1) * from_step);
      pairs[p] = _mm512_unpacklo_pd(one, other);
      pairs[p + 1] = _mm512_unpackhi_pd(one, other);
    }
    for (int odd = 0; odd < 2; ++odd) {  // a lane of two numbers of `pairs` is the element 2 lane + odd of two rows
      const __m512d low04 = _mm512_shuffle_f64x2(pairs[odd], pairs[2 + odd], 0x88),  // lanes 0 and 2 of rows 0 to 3
          low26 = _mm512_shuffle_f64x2(pairs[odd], pairs[2 + odd], 0xdd),            // lanes 1 and 3
          high04 = _mm512_shuffle_f64x2(pairs[4 + odd], pairs[6 + odd], 0x88),       // and of rows 4 to 7
          high26 = _mm512_shuffle_f64x2(pairs[4 + odd], pairs[6 + odd], 0xdd);
      _mm512_storeu_pd(to + odd * to_step, factors(_mm512_shuffle_f64x2(low04, high04, 0x88)));
      _mm512_storeu_pd(to + (4 + odd) * to_step, factors(_mm512_shuffle_f64x2(low04, high04, 0xdd)));
      _mm512_storeu_pd(to + (2 + odd) * to_step, factors(_mm512_shuffle_f64x2(low26, high26, 0x88)));
      _mm512_storeu_pd(to + (6 + odd) * to_step, factors(_mm512_shuffle_f64x2(low26, high26, 0xdd)));
    }
  }
  // As right_factor.
  [[SHARD_AVX512]] static __m512d factors(__m512d numbers) {
    const __m512i bits = _mm512_castpd_si512(numbers);
    const __mmask8 some = _mm512_test_epi64_mask(_mm512_slli_epi64(bits, 1), _mm512_set1_epi64(-1));
    return _mm512_castsi512_pd(_mm512_mask_or_epi64(bits, some, bits, _mm512_set1_epi64(1)));
  }
};
#endif

}  // namespace shardproof::cpu_product
