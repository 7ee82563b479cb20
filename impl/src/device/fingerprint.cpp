#include "testing/device/fingerprint.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <vector>

namespace shardproof {
namespace {

// Odd numbers without a pattern: digits of the golden ratio and of pi.
constexpr uint64_t kFirst = 0x9e3779b97f4a7c15, kSecond = 0x243f6a8885a308d3;
constexpr int64_t kBlockBytes = int64_t{1} << 20;
constexpr int64_t kElementsAtOnce = int64_t{1} << 22;

uint64_t mixed(uint64_t value) {
  value = (value ^ (value >> 32)) * kFirst;
  value = (value ^ (value >> 29)) * kSecond;
  return value ^ (value >> 32);
}

// Each lane takes every eighth word. A step of a lane is a bijection of what it knows and of the word: a product by an odd
// number, after a rotation, without which differences of top bits, as of signs, would stay there and cancel.
uint64_t of_block(const std::byte* data, int64_t bytes) {
  constexpr int kLanes = 8;
  constexpr int64_t kStride = kLanes * static_cast<int64_t>(sizeof(uint64_t));
  std::array<uint64_t, kLanes> lanes, words;
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = kFirst * static_cast<uint64_t>(lane + 1);
  const auto take = [&](const std::byte* from, int64_t count) {
    std::memcpy(words.data(), from, static_cast<size_t>(count));
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = std::rotl(lanes[lane] ^ words[lane], 29) * kFirst;
  };
  int64_t at = 0;
  for (; at + kStride <= bytes; at += kStride) take(data + at, kStride);
  if (at < bytes) {
    words = {};
    take(data + at, bytes - at);
  }
  uint64_t print = static_cast<uint64_t>(bytes);
  for (const uint64_t lane : lanes) print = combined(print, lane);
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
