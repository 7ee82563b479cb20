#include "internal/checkpoint/format/crc32.h"

#include <array>
#include <cstring>
#if defined(__x86_64__)
#  include <immintrin.h>
#endif

namespace shardproof::checkpoint {
namespace {

constexpr uint32_t kPolynomial = 0xEDB88320;  // bits reversed: the lowest is the highest power

using Table = std::array<std::array<uint32_t, 256>, 8>;

constexpr Table make_table() {
  Table table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = crc & 1 ? crc >> 1 ^ kPolynomial : crc >> 1;
    table[0][byte] = crc;
  }
  for (size_t slice = 1; slice < 8; ++slice)
    for (uint32_t byte = 0; byte < 256; ++byte)
      table[slice][byte] = table[slice - 1][byte] >> 8 ^ table[0][table[slice - 1][byte] & 255];
  return table;
}
constexpr Table kTable = make_table();

// `crc` here and below is the bare register, without the inversions before and after.
uint32_t by_table(uint32_t crc, const unsigned char* data, size_t bytes) {
  for (; bytes >= 8; data += 8, bytes -= 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    word ^= crc;
    crc = 0;
    for (size_t i = 0; i < 8; ++i) crc ^= kTable[7 - i][word >> (8 * i) & 255];
  }
  for (; bytes > 0; ++data, --bytes) crc = crc >> 8 ^ kTable[0][(crc ^ *data) & 255];
  return crc;
}

// Product of two polynomials modulo the CRC's, bits reversed as everywhere here.
constexpr uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = uint32_t{1} << 31; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = b & 1 ? b >> 1 ^ kPolynomial : b >> 1;
  }
  return product;
}

// x^bits modulo the polynomial.
constexpr uint32_t power(uint64_t bits) {
  uint32_t result = uint32_t{1} << 31, square = uint32_t{1} << 30;
  for (; bits != 0; bits >>= 1) {
    if (bits & 1) result = multiply(result, square);
    square = multiply(square, square);
  }
  return result;
}

#if defined(__x86_64__)
// x^bits in the place that a carry-less product of reversed operands wants it: one bit up.
constexpr uint64_t fold_constant(uint64_t bits) {
  return static_cast<uint64_t>(power(bits)) << 1;
}

__attribute__((target("pclmul,sse4.1"))) inline __m128i fold(__m128i value, __m128i constants, __m128i next) {
  const __m128i low = _mm_clmulepi64_si128(value, constants, 0x00);
  const __m128i high = _mm_clmulepi64_si128(value, constants, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

// Four lanes of 16 bytes are carried forward over 64 bytes a round by two carry-less products each; what is left of them has
// the same remainder as the data, so the table finishes it. A multiple of 64 bytes, at least 64.
__attribute__((target("pclmul,sse4.1"))) uint32_t by_products(uint32_t crc, const unsigned char* data, size_t bytes) {
  const auto load = [](const unsigned char* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); };
  const __m128i by_64 = _mm_set_epi64x(fold_constant(512 - 32), fold_constant(512 + 32));
  const __m128i by_16 = _mm_set_epi64x(fold_constant(128 - 32), fold_constant(128 + 32));
  __m128i a = _mm_xor_si128(load(data), _mm_cvtsi32_si128(static_cast<int>(crc)));
  __m128i b = load(data + 16), c = load(data + 32), d = load(data + 48);
  for (data += 64, bytes -= 64; bytes >= 64; data += 64, bytes -= 64) {
    a = fold(a, by_64, load(data));
    b = fold(b, by_64, load(data + 16));
    c = fold(c, by_64, load(data + 32));
    d = fold(d, by_64, load(data + 48));
  }
  a = fold(fold(fold(a, by_16, b), by_16, c), by_16, d);
  unsigned char rest[16];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(rest), a);
  return by_table(0, rest, sizeof rest);
}

const bool kHasProducts = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
#endif

}  // namespace

uint32_t crc32(uint32_t crc, const void* data, size_t bytes) {
  const auto* from = static_cast<const unsigned char*>(data);
  crc = ~crc;
#if defined(__x86_64__)
  if (kHasProducts && bytes >= 128) {
    const size_t most = bytes / 64 * 64;
    crc = by_products(crc, from, most);
    from += most;
    bytes -= most;
  }
#endif
  return ~by_table(crc, from, bytes);
}

uint32_t crc32_join(uint32_t first, uint32_t second, uint64_t second_bytes) {
  return multiply(power(8 * second_bytes), first) ^ second;
}

}  // namespace shardproof::checkpoint
