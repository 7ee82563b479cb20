// Elements and packs of them, as the runners of the CPU and of a GPU see them: the same source for both compilers.
//
// SHARD_TWIN compiles this source for the CPU as a GPU has it: in words that have to be aligned, in launches of blocks and
// threads (pack_math.cpp). It then has a namespace of its own, since the library has the same names with the CPU's loops.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#ifdef SHARD_TWIN
#  define SHARD_KERNELS kernel_twins
#else
#  define SHARD_KERNELS kernels
#endif
#if defined(__CUDA_ARCH__) || defined(SHARD_TWIN)
#  define SHARD_WORDS
#endif

#ifdef __CUDACC__
#  include <cuda_bf16.h>
#  include <cuda_fp16.h>
#  define SHARD_HD __host__ __device__ __forceinline__
#  define SHARD_VECTORIZE
#  define SHARD_UNROLL _Pragma("unroll")
#  define SHARD_ONE_BY_ONE _Pragma("unroll 1")
#else
#  define SHARD_HD inline
// Before a loop in which no iteration needs another one's result, though pointers in it may be equal.
#  define SHARD_VECTORIZE _Pragma("GCC ivdep")
#  define SHARD_UNROLL
// Before a loop whose rounds nvcc must not count: it would count them from the number of the block, in 32 bits where that fits.
#  define SHARD_ONE_BY_ONE
#endif

namespace shardproof::SHARD_KERNELS {

template <class To, class From>
SHARD_HD To bits_of(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To bits;
  memcpy(&bits, &value, sizeof(To));
  return bits;
}

struct Bf16 {
  uint16_t bits;
};
struct Fp16 {
  uint16_t bits;
};

SHARD_HD float widen(float value) {
  return value;
}
SHARD_HD double widen(double value) {
  return value;
}
SHARD_HD float widen(Bf16 value) {
  return bits_of<float>(static_cast<uint32_t>(value.bits) << 16);
}
SHARD_HD float widen(Fp16 value) {
#ifdef __CUDA_ARCH__
  return __half2float(__ushort_as_half(value.bits));
#else
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000) << 16, exponent = value.bits >> 10 & 0x1f;
  const uint32_t fraction = value.bits & 0x3ff;
  if (exponent == 0) {  // zero and denormals, multiples of 2^-24
    const float magnitude = static_cast<float>(fraction) * 0x1p-24f;
    return bits_of<float>(bits_of<uint32_t>(magnitude) | sign);
  }
  const uint32_t rebased = exponent == 31 ? 255u : exponent + 112;
  return bits_of<float>(sign | rebased << 23 | fraction << 13);
#endif
}

// Rounded to nearest, ties to even.
template <class T>
struct Narrow {
  SHARD_HD static T of(float value) { return static_cast<T>(value); }
};
template <>
struct Narrow<Bf16> {
  SHARD_HD static Bf16 of(float value) {
    if (value != value) return {0x7fc0};
    const uint32_t bits = bits_of<uint32_t>(value);
    return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
  }
};
template <>
struct Narrow<Fp16> {
  SHARD_HD static Fp16 of(float value) {
#ifdef __CUDA_ARCH__
    return {__half_as_ushort(__float2half_rn(value))};
#else
    const uint32_t bits = bits_of<uint32_t>(value), magnitude = bits & 0x7fffffff;
    const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
    if (magnitude > 0x7f800000) return {static_cast<uint16_t>(sign | 0x7e00)};
    if (magnitude >= 0x477ff000) return {static_cast<uint16_t>(sign | 0x7c00)};  // from 65520 on: infinity
    if (magnitude < 0x38800000) {  // below 2^-14: added to what makes 2^-24 the last bit, so that the addition rounds
      const float shifted = bits_of<float>(magnitude) + 0.5f;
      return {static_cast<uint16_t>(sign | (bits_of<uint32_t>(shifted) - 0x3f000000))};
    }
    const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
    return {static_cast<uint16_t>(sign | (rounded - 0x38000000) >> 13)};
#endif
  }
};

SHARD_HD bool is_nan(float value) {
  return value != value;
}
SHARD_HD bool is_nan(double value) {
  return value != value;
}

// W neighbours. A GPU loads and stores them in words of 16 bytes where they are that long; the pointer is aligned to them then.
template <class T, int W>
struct Pack {
  T at[W];
};

#ifdef __CUDACC__
using Word16 = uint4;
using Word8 = uint2;
#else
struct Word16 {
  uint32_t part[4];
};
struct Word8 {
  uint32_t part[2];
};
// What a GPU answers with an error that ends the process.
template <class Word>
inline void require_aligned(const void* at) {
  if (reinterpret_cast<uintptr_t>(at) % sizeof(Word) != 0)
    throw std::logic_error("[kernels] a word of " + std::to_string(sizeof(Word)) + " bytes is not aligned");
}
#endif

template <class Word>
SHARD_HD Word word_from(const void* at) {
#ifdef __CUDA_ARCH__
  return *static_cast<const Word*>(at);
#else
  require_aligned<Word>(at);
  Word word;
  memcpy(&word, at, sizeof(Word));
  return word;
#endif
}
template <class Word>
SHARD_HD void word_to(void* at, const Word& word) {
#ifdef __CUDA_ARCH__
  *static_cast<Word*>(at) = word;
#else
  require_aligned<Word>(at);
  memcpy(at, &word, sizeof(Word));
#endif
}

constexpr int64_t kWordBytes = 16;
template <class T, int W>
constexpr int64_t word_bytes =
    W == 1 ? static_cast<int64_t>(alignof(T)) : (static_cast<int64_t>(W * sizeof(T)) % kWordBytes == 0 ? kWordBytes : 8);

template <int W, class T>
SHARD_HD Pack<T, W> load(const T* from) {
  Pack<T, W> pack;
  if constexpr (W == 1) {
    pack.at[0] = *from;
  } else {
#ifdef SHARD_WORDS
    if constexpr (word_bytes<T, W> == kWordBytes) {
      SHARD_UNROLL
      for (int k = 0; k < static_cast<int>(W * sizeof(T) / kWordBytes); ++k) {
        const auto word = word_from<Word16>(reinterpret_cast<const char*>(from) + k * kWordBytes);
        memcpy(reinterpret_cast<char*>(pack.at) + k * kWordBytes, &word, kWordBytes);
      }
    } else {
      const auto word = word_from<Word8>(from);
      memcpy(pack.at, &word, sizeof(pack));
    }
#else
    for (int w = 0; w < W; ++w) pack.at[w] = from[w];
#endif
  }
  return pack;
}

template <int W, class T>
SHARD_HD void keep(T* to, const Pack<T, W>& pack) {
  if constexpr (W == 1) {
    *to = pack.at[0];
  } else {
#ifdef SHARD_WORDS
    if constexpr (word_bytes<T, W> == kWordBytes) {
      SHARD_UNROLL
      for (int k = 0; k < static_cast<int>(W * sizeof(T) / kWordBytes); ++k) {
        Word16 word;
        memcpy(&word, reinterpret_cast<const char*>(pack.at) + k * kWordBytes, kWordBytes);
        word_to(reinterpret_cast<char*>(to) + k * kWordBytes, word);
      }
    } else {
      Word8 word;
      memcpy(&word, pack.at, sizeof(word));
      word_to(to, word);
    }
#else
    for (int w = 0; w < W; ++w) to[w] = pack.at[w];
#endif
  }
}

// W neighbours to read once: a GPU loads them as a pack, a CPU leaves them where they are.
#ifdef SHARD_WORDS
template <int W, class T>
SHARD_HD Pack<T, W> look(const T* from) {
  return load<W>(from);
}
#else
template <class T>
struct View {
  const T* at;
};
template <int W, class T>
SHARD_HD View<T> look(const T* from) {
  return {from};
}
#endif

// Stores make(0) to make(W - 1).
template <int W, class T, class Make>
SHARD_HD void fill(T* to, const Make& make) {
#ifdef SHARD_WORDS
  Pack<T, W> pack;
  for (int w = 0; w < W; ++w) pack.at[w] = make(w);
  keep<W>(to, pack);
#else
  SHARD_VECTORIZE
  for (int w = 0; w < W; ++w) to[w] = make(w);
#endif
}

// Whether packs of W may begin at every multiple of W behind the pointer.
template <int W, class T>
inline bool aligned(const T* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(word_bytes<T, W>) == 0;
}

}  // namespace shardproof::SHARD_KERNELS
