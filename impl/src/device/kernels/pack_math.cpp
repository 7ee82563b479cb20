// The kernels' source once more, compiled for the CPU as a GPU has it.
#define SHARD_TWIN

#include "internal/device/pack_math.h"

#include <array>
#include <memory>
#include <vector>

#include "device/kernels/canonical_rules.h"
#include "device/kernels/cpu_runner.h"
#include "device/kernels/kernel_math.h"
#include "device/kernels/launches.h"

namespace shardproof {
namespace {

using namespace kernel_twins;

// Goes through the blocks and threads of the launches of gpu_runner.cuh, one by one.
struct TwinRunner : CpuRunner {
  template <class Visit>
  static void each_of_launch(const Launch& launch, const Visit& visit) {
    const auto blocks = static_cast<uint32_t>(launch.blocks());
    for (uint32_t block = 0; block < blocks; ++block)
      for (uint32_t thread = 0; thread < kThreads; ++thread) visit(block, thread);
  }

  template <class Rule>
  void each(int64_t count, const Rule& rule) const {
    const auto [packs, rest] = cover(count, Rule::kWidth, rule.fits());
    each_of_launch(packs, [&, &all = packs](uint32_t block, uint32_t thread) {
      each_thread<Rule::kWidth>(block, thread, all.packs, all.begin, rule);
    });
    each_of_launch(rest, [&, &all = rest](uint32_t block, uint32_t thread) {
      each_thread<1>(block, thread, all.packs, all.begin, rule);
    });
  }

  template <class Rule>
  int64_t first(int64_t count, const Rule& rule) const {
    int64_t found = count;
    note(count, rule, 0, &found);
    return found;
  }

  template <class Rule>
  void note(int64_t count, const Rule& rule, int64_t offset, int64_t* least) const {
    const auto lower = [&](uint64_t place) {
      if (place != kNowhere) *least = std::min(*least, offset + static_cast<int64_t>(place));
    };
    const auto [packs, rest] = cover(count, Rule::kWidth, rule.fits());
    each_of_launch(packs, [&, &all = packs](uint32_t block, uint32_t thread) {
      lower(first_thread<Rule::kWidth>(block, thread, all.packs, all.begin, rule));
    });
    each_of_launch(rest, [&, &all = rest](uint32_t block, uint32_t thread) {
      lower(first_thread<1>(block, thread, all.packs, all.begin, rule));
    });
  }

  int64_t largest_magnitude_bits(const double* x, int64_t count) const {
    int64_t bits = 0;
    const uint32_t blocks = largest_blocks(count);
    for (uint32_t block = 0; block < blocks; ++block)
      for (uint32_t thread = 0; thread < kThreads; ++thread)
        bits = std::max(bits, largest_thread(block, thread, blocks, count, x));
    return bits;
  }

  bool product(const ExactProduct& product) const { return product_by_elements(*this, product); }

  void exact(std::span<const FlatSpan> spans, bool squares, int64_t* counters) const {
    std::vector<uint32_t> limbs(kExactSlots, 0xdeadbeef);  // shared memory holds anything at first
    auto* sums = reinterpret_cast<unsigned long long*>(counters);
    each_chunk(spans, kExactChunk, [&](const FlatSpan& chunk) {
      for (uint32_t thread = 0; thread < kExactThreads; ++thread) exact_clear(thread, limbs.data());
      for (uint32_t thread = 0; thread < kExactThreads; ++thread) exact_count(thread, chunk, squares, limbs.data());
      for (uint32_t thread = 0; thread < kExactThreads; ++thread) exact_collect(thread, limbs.data(), sums);
    });
  }
};

}  // namespace

std::shared_ptr<const DeviceMath> pack_math() {
  return std::make_shared<const KernelMath<TwinRunner>>(TwinRunner());
}

TwinLaunches twin_launches(int64_t count, int width, bool fits) {
  const Cover all = cover(count, width, fits);
  return {all.packs.packs, all.packs.blocks(), all.rest.begin, all.rest.packs, all.rest.blocks()};
}

int64_t twin_pack(uint32_t block, uint32_t thread) {
  return pack_of(block, thread);
}

}  // namespace shardproof
