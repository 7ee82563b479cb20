#include "comm/finished_sum.h"

#include <algorithm>
#include <limits>

#include "shardproof/base/dtypes.h"

namespace shardproof {
namespace {

constexpr int64_t kBlockNumel = (32 << 10) / sizeof(float);

bool finish_block(const DeviceMath& math, std::byte* sum, int64_t numel, const SumFinish& finish) {
  constexpr double kLargest = std::numeric_limits<float>::max();
  const bool finite = !finish.asks_finite || math.first_beyond(Element::f32, sum, numel, kLargest) == numel;
  if (finish.factor != 1) math.scale(reinterpret_cast<float*>(sum), numel, static_cast<float>(finish.factor));
  return finite;
}

}  // namespace

bool add_and_finish(const DeviceMath& math, Element type, Reduce op, std::vector<const std::byte*> terms, int64_t numel,
                    std::byte* target, const SumFinish& finish) {
  if (finish.factor == 1 && !finish.asks_finite) {
    math.reduce(type, op, terms, numel, target);
    return true;
  }
  bool finite = true;
  for (int64_t at = 0; at < numel; at += kBlockNumel) {
    const int64_t count = std::min(kBlockNumel, numel - at);
    const auto bytes = count * static_cast<int64_t>(sizeof(float));
    math.reduce(type, op, terms, count, target);
    finite &= finish_block(math, target, count, finish);
    for (const std::byte*& term : terms) term += bytes;
    target += bytes;
  }
  return finite;
}

}  // namespace shardproof
