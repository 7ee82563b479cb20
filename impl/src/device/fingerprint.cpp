#include "internal/device/fingerprint.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <vector>

#if defined(__x86_64__)
#  include <immintrin.h>
#endif

namespace shardproof {
namespace {

// Odd numbers without a pattern: digits of the golden ratio and of pi.
constexpr uint64_t kFirst = 0x9e3779b97f4a7c15, kSecond = 0x243f6a8885a308d3;
constexpr uint64_t kFactor = 0x9e3779b1;
constexpr int kRotation = 29;
constexpr int64_t kBlockBytes = int64_t{1} << 20, kWideBytesMin = 4096;
constexpr int64_t kElementsAtOnce = int64_t{1} << 22;

uint64_t mixed(uint64_t value) {
  value = (value ^ (value >> 32)) * kFirst;
  value = (value ^ (value >> 29)) * kSecond;
  return value ^ (value >> 32);
}

// A block is cut into four parts, which are read side by side: a processor fetches from four places faster than from one. Each
// part has eight lanes, each of which takes every eighth word. A step of a lane is a bijection of what it knows and of a word:
// a product by an odd number, after a rotation. Without it differences of top bits, as of signs, would stay there and cancel.
constexpr int kParts = 4, kLanes = 8;
constexpr int64_t kStride = kLanes * static_cast<int64_t>(sizeof(uint64_t));
constexpr int64_t kAhead = 2048;  // bytes

using Lanes = std::array<std::array<uint64_t, kLanes>, kParts>;

void take(std::array<uint64_t, kLanes>& lanes, const std::byte* from, int64_t bytes) {
  std::array<uint64_t, kLanes> words = {};
  std::memcpy(words.data(), from, static_cast<size_t>(bytes));
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = std::rotl(lanes[lane] ^ words[lane], kRotation) * kFactor;
}

void take_parts(Lanes& lanes, const std::byte* data, int64_t bytes_of_part) {
  for (int part = 0; part < kParts; ++part)
    for (int64_t at = 0; at < bytes_of_part; at += kStride) take(lanes[part], data + part * bytes_of_part + at, kStride);
}

#if defined(__x86_64__)
// The same, four lanes at a time. AVX2 multiplies numbers of 32 bits, as the factor is.
[[gnu::target("avx2")]] void take_parts_avx2(Lanes& lanes, const std::byte* data, int64_t bytes_of_part) {
  constexpr int kVectors = kParts * 2;
  const __m256i factor = _mm256_set1_epi64x(kFactor);
  auto* const places = reinterpret_cast<__m256i*>(lanes.data());
  __m256i held[kVectors];
  for (int v = 0; v < kVectors; ++v) held[v] = _mm256_loadu_si256(places + v);
  for (int64_t at = 0; at < bytes_of_part; at += kStride) {
#  pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const std::byte* const from = data + v / 2 * bytes_of_part + at;
      if (v % 2 == 0) __builtin_prefetch(from + kAhead);
      const __m256i mixed = _mm256_xor_si256(held[v], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + v % 2));
      const __m256i turned = _mm256_or_si256(_mm256_slli_epi64(mixed, kRotation), _mm256_srli_epi64(mixed, 64 - kRotation));
      const __m256i low = _mm256_mul_epu32(turned, factor), high = _mm256_mul_epu32(_mm256_srli_epi64(turned, 32), factor);
      held[v] = _mm256_add_epi64(low, _mm256_slli_epi64(high, 32));
    }
  }
  for (int v = 0; v < kVectors; ++v) _mm256_storeu_si256(places + v, held[v]);
}
const bool kHasAvx2 = __builtin_cpu_supports("avx2");
#endif

uint64_t of_block(const std::byte* data, int64_t bytes) {
  Lanes lanes;
  for (int i = 0; i < kParts * kLanes; ++i) lanes[i / kLanes][i % kLanes] = kFirst * static_cast<uint64_t>(i + 1);
  const int64_t bytes_of_part = bytes / (kParts * kStride) * kStride;
#if defined(__x86_64__)
  if (kHasAvx2 && bytes >= kWideBytesMin)
    take_parts_avx2(lanes, data, bytes_of_part);
  else
#endif
    take_parts(lanes, data, bytes_of_part);
  int64_t at = kParts * bytes_of_part;
  for (int part = 0; at < bytes; ++part, at += kStride) take(lanes[part], data + at, std::min(kStride, bytes - at));
  uint64_t print = static_cast<uint64_t>(bytes);
  for (const auto& of_part : lanes)
    for (const uint64_t lane : of_part) print = combined(print, lane);
  return print;
}

uint64_t of_memory(const at::Tensor& values) {
  const auto* data = static_cast<const std::byte*>(values.const_data_ptr());
  const auto bytes = static_cast<int64_t>(values.nbytes()), blocks = (bytes + kBlockBytes - 1) / kBlockBytes;
  std::vector<uint64_t> prints(static_cast<size_t>(blocks));
  at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block)
      prints[static_cast<size_t>(block)] =
          of_block(data + block * kBlockBytes, std::min(kBlockBytes, bytes - block * kBlockBytes));
  });
  uint64_t print = static_cast<uint64_t>(bytes);
  for (const uint64_t block : prints) print = combined(print, block);
  return print;
}

}  // namespace

uint64_t combined(uint64_t first, uint64_t second) { return mixed(std::rotl(mixed(first), 17) ^ second); }

// The sum of each element's bits, mixed with its place.
uint64_t fingerprint_by_operators(const at::Tensor& values) {
  const at::ScalarType word = values.element_size() == 8   ? at::kLong
                              : values.element_size() == 4 ? at::kInt
                              : values.element_size() == 2 ? at::kShort
                                                           : at::kChar;
  const at::Tensor words = values.view(word);
  at::Tensor sum = at::zeros({}, words.options().dtype(at::kLong));
  const auto factor = [](uint64_t bits) { return static_cast<int64_t>(bits); };
  for (int64_t at = 0; at < words.numel(); at += kElementsAtOnce) {
    const int64_t count = std::min(kElementsAtOnce, words.numel() - at);
    at::Tensor mixed = at::arange(at + 1, at + count + 1, sum.options()).mul_(factor(kFirst));
    mixed.bitwise_xor_(words.narrow(0, at, count).to(at::kLong)).mul_(factor(kSecond));
    mixed.bitwise_xor_(mixed.bitwise_right_shift(31)).mul_(factor(kFirst));
    sum += mixed.bitwise_xor_(mixed.bitwise_right_shift(29)).sum();
  }
  return combined(static_cast<uint64_t>(values.nbytes()), static_cast<uint64_t>(sum.item<int64_t>()));
}

uint64_t fingerprint(const at::Tensor& values) {
  return values.is_cpu() ? of_memory(values) : fingerprint_by_operators(values);
}

}  // namespace shardproof
