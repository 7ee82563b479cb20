// Runs rules on the CPU: one element a pack, in loops that vectorise, or a block of elements where a rule reads many arrays.
// gpu_runner.cuh does it on a GPU.
#pragma once

#include <algorithm>
#include <array>
#include <span>

#include "device/kernels/cpu_product.h"
#include "device/kernels/element_rules.h"
#include "device/kernels/launches.h"

namespace shardproof::SHARD_KERNELS {

// Arrays to sum, which the caller keeps.
template <class T>
struct CpuTerms {
  const std::byte* const* at;
  int count;

  explicit CpuTerms(std::span<const std::byte* const> given) : at(given.data()), count(static_cast<int>(given.size())) {}
  const T* operator[](int k) const { return reinterpret_cast<const T*>(at[k]); }
};

struct CpuRunner {
  template <class T>
  using Terms = CpuTerms<T>;

  template <class Rule>
  void each(int64_t count, const Rule& given) const {
    const Rule rule = given;  // a copy that the loops' stores cannot change
    if constexpr (requires { Rule::kBlock; }) {
      constexpr int kPart = 64;
      int64_t i = 0;
      for (; i + Rule::kBlock <= count; i += Rule::kBlock) rule.template pack<Rule::kBlock>(i);
      for (; i + kPart <= count; i += kPart) rule.template pack<kPart>(i);
      for (; i < count; ++i) rule.template pack<1>(i);
    } else {
      SHARD_VECTORIZE
      for (int64_t i = 0; i < count; ++i) rule.template pack<1>(i);
    }
  }

  // Looks everywhere, as rules write, too.
  template <class Rule>
  int64_t first(int64_t count, const Rule& rule) const {
    const int64_t whole = rule.fits() ? count / Rule::kWidth * Rule::kWidth : 0;
    int64_t found = count;
    for (int64_t i = 0; i < whole; i += Rule::kWidth) {
      const int at = rule.template pack<Rule::kWidth>(i);
      if (at < Rule::kWidth) found = std::min(found, i + at);
    }
    for (int64_t i = whole; i < count; ++i)
      if (rule.template pack<1>(i) < 1) found = std::min(found, i);
    return found;
  }

  void zero(void* target, int64_t bytes) const {
    if (bytes > 0) memset(target, 0, static_cast<size_t>(bytes));
  }

  void copy(void* target, const void* source, int64_t bytes) const {
    if (bytes > 0) memcpy(target, source, static_cast<size_t>(bytes));
  }

  void exact(std::span<const FlatSpan> spans, bool squares, std::span<int64_t> counters) const {
    each_chunk(spans, kTermsInCounters,
               [&](const FlatSpan& chunk) { exact_chunk(chunk.data, chunk.count, squares, counters); });
  }

  bool product(const ExactProduct& product, bool check) const { return cpu_product::run(product, check); }

 private:
  static void exact_chunk(const float* values, int64_t count, bool squares, std::span<int64_t> counters) {
    std::array<std::array<uint32_t, kLimbs>, 256> limbs{};
    for (int64_t i = 0; i < count; ++i) {
      const ExactTerm term = exact_term(values[i], squares);
      for (int k = 0; k < kLimbs; ++k) limbs[term.exponent][static_cast<size_t>(k)] += term.limb[k];
    }
    for (size_t e = 0; e < limbs.size(); ++e) {
      counters[2 * e] += static_cast<int64_t>(low_part(limbs[e][0], limbs[e][1]));
      counters[2 * e + 1] += static_cast<int64_t>(high_part(limbs[e][0], limbs[e][1], limbs[e][2]));
    }
  }
};

}  // namespace shardproof::SHARD_KERNELS
