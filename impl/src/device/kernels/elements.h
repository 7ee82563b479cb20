// Elements and packs of them, as the runners of the CPU and of a GPU see them: the same source for both compilers.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __CUDACC__
#  include <cuda_bf16.h>
#  include <cuda_fp16.h>
#  define SHARD_HD __host__ __device__ __forceinline__
#  define SHARD_VECTORIZE
#else
#  define SHARD_HD inline
// Before a loop in which no iteration needs another one's result, though pointers in it may be equal.
#  define SHARD_VECTORIZE _Pragma("GCC ivdep")
#endif

namespace shardproof::kernels {

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
#ifdef __CUDA_ARCH__
    if constexpr (word_bytes<T, W> == kWordBytes) {
#  pragma unroll
      for (int k = 0; k < static_cast<int>(W * sizeof(T) / kWordBytes); ++k) {
        const uint4 word = reinterpret_cast<const uint4*>(from)[k];
        memcpy(reinterpret_cast<char*>(pack.at) + k * kWordBytes, &word, kWordBytes);
      }
    } else {
      const uint2 word = *reinterpret_cast<const uint2*>(from);
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
#ifdef __CUDA_ARCH__
    if constexpr (word_bytes<T, W> == kWordBytes) {
#  pragma unroll
      for (int k = 0; k < static_cast<int>(W * sizeof(T) / kWordBytes); ++k) {
        uint4 word;
        memcpy(&word, reinterpret_cast<const char*>(pack.at) + k * kWordBytes, kWordBytes);
        reinterpret_cast<uint4*>(to)[k] = word;
      }
    } else {
      uint2 word;
      memcpy(&word, pack.at, sizeof(word));
      *reinterpret_cast<uint2*>(to) = word;
    }
#else
    for (int w = 0; w < W; ++w) to[w] = pack.at[w];
#endif
  }
}

// W neighbours to read once: a GPU loads them as a pack, a CPU leaves them where they are.
#ifdef __CUDA_ARCH__
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
#ifdef __CUDA_ARCH__
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

}  // namespace shardproof::kernels
