// How launches of kernels cover elements, and what one thread of them does: for gpu_runner.cuh, and for its twin on the CPU,
// which goes through the same blocks and threads one by one (pack_math.cpp).
#pragma once

#include <algorithm>
#include <limits>
#include <span>
#include <stdexcept>
#include <string>

#include "device/kernels/element_rules.h"
#include "device/kernels/exact_terms.h"
#include "device/kernels/search_rules.h"

namespace shardproof::SHARD_KERNELS {

constexpr int kThreads = 256;  // of a block, each with a pack
constexpr int64_t kBlocksMax = std::numeric_limits<int32_t>::max();  // of a grid along x

// One launch: packs of `width` neighbours, the first of which begins at `begin`.
struct Launch {
  int64_t begin, packs;
  int width;

  int64_t blocks() const {
    const int64_t needed = (packs + kThreads - 1) / kThreads;
    if (needed > kBlocksMax)
      throw std::length_error("[kernels] an array of more elements than one launch covers: " + std::to_string(packs) +
                              " packs. Cut it into several calls");
    return needed;
  }
};

// [0, count) as two launches: packs where memory is aligned for them, and what is left one by one.
struct Cover {
  Launch packs, rest;
};
inline Cover cover(int64_t count, int width, bool fits) {
  const int64_t packs = fits ? count / width : 0;
  return {{0, packs, width}, {packs * width, count - packs * width, 1}};
}

SHARD_HD int64_t pack_of(uint32_t block, uint32_t thread) {
  return static_cast<int64_t>(block) * kThreads + thread;
}

template <int W, class Rule>
SHARD_HD void each_thread(uint32_t block, uint32_t thread, int64_t packs, int64_t begin, const Rule& rule) {
  const int64_t pack = pack_of(block, thread);
  if (pack < packs) rule.template pack<W>(begin + pack * W);
}

constexpr uint64_t kNowhere = ~uint64_t{0};

// The place that the thread's pack found.
template <int W, class Rule>
SHARD_HD uint64_t first_thread(uint32_t block, uint32_t thread, int64_t packs, int64_t begin, const Rule& rule) {
  const int64_t pack = pack_of(block, thread);
  if (pack >= packs) return kNowhere;
  const int64_t i = begin + pack * W;
  const int at = rule.template pack<W>(i);
  return at < W ? static_cast<uint64_t>(i + at) : kNowhere;
}

// The bits of the largest magnitude that a thread finds, of `blocks` blocks.
SHARD_HD int64_t largest_thread(uint32_t block, uint32_t thread, uint32_t blocks, int64_t count, const double* x) {
  int64_t bits = 0;
  SHARD_ONE_BY_ONE
  for (int64_t i = pack_of(block, thread); i < count; i += static_cast<int64_t>(blocks) * kThreads)
    bits = larger_magnitude(bits, x[i]);
  return bits;
}
inline uint32_t largest_blocks(int64_t count) {
  constexpr int64_t kMost = 256;
  return static_cast<uint32_t>(std::min(kMost, (count + kThreads - 1) / kThreads));
}

// Cuts spans into chunks of at most `longest` terms.
template <class Use>
void each_chunk(std::span<const FlatSpan> spans, int64_t longest, const Use& use) {
  for (const FlatSpan& span : spans)
    for (int64_t begin = 0; begin < span.count; begin += longest)
      use(FlatSpan{span.data + begin, std::min(longest, span.count - begin)});
}

// An exact sum of one chunk by one block, in three steps between which all threads of the block meet. Each lane has counters of
// its own, so that no two threads of a warp meet in one bank: [exponent][limb][lane].
constexpr int kExactThreads = 1024, kLanes = 32;
constexpr int64_t kExactChunk = int64_t{1} << 18;
constexpr int kChunksMax = 240;  // in one launch's arguments
constexpr int kExactSlots = 256 * kLimbs * kLanes;
static_assert(kExactChunk / kLanes + 1 <= kTermsInCounters);

template <class T>
SHARD_HD void atomic_add(T* counter, T value) {
#ifdef __CUDA_ARCH__
  atomicAdd(counter, value);
#else
  *counter += value;
#endif
}

SHARD_HD void exact_clear(uint32_t thread, uint32_t* limbs) {
  for (int k = static_cast<int>(thread); k < kExactSlots; k += kExactThreads) limbs[k] = 0;
}

SHARD_HD void exact_count(uint32_t thread, const FlatSpan& span, bool squares, uint32_t* limbs) {
  const int lane = static_cast<int>(thread) % kLanes;
  const auto add = [&](float value) {
    const ExactTerm term = exact_term(value, squares);
    for (int k = 0; k < kLimbs; ++k)
      if (term.limb[k] != 0)
        atomic_add(&limbs[(static_cast<int>(term.exponent) * kLimbs + k) * kLanes + lane], term.limb[k]);
  };
  const bool packed = reinterpret_cast<uintptr_t>(span.data) % kWordBytes == 0;
  const int64_t whole = packed ? span.count / 4 : 0;
  for (int64_t i = thread; i < whole; i += kExactThreads) {
    const Pack<float, 4> pack = load<4>(span.data + 4 * i);
    for (int w = 0; w < 4; ++w) add(pack.at[w]);
  }
  for (int64_t i = 4 * whole + thread; i < span.count; i += kExactThreads) add(span.data[i]);
}

SHARD_HD void exact_collect(uint32_t thread, const uint32_t* limbs, unsigned long long* counters) {
  for (int exponent = static_cast<int>(thread); exponent < 256; exponent += kExactThreads) {
    uint64_t sum[kLimbs] = {};
    for (int k = 0; k < kLimbs; ++k)
      for (int step = 0; step < kLanes; ++step)
        sum[k] += limbs[(exponent * kLimbs + k) * kLanes + (exponent + step) % kLanes];
    if ((sum[0] | sum[1] | sum[2]) == 0) continue;
    atomic_add(&counters[2 * exponent], static_cast<unsigned long long>(low_part(sum[0], sum[1])));
    atomic_add(&counters[2 * exponent + 1], static_cast<unsigned long long>(high_part(sum[0], sum[1], sum[2])));
  }
}

}  // namespace shardproof::SHARD_KERNELS
