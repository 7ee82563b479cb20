// Runs rules on the CPU: one element a pack, in loops that vectorise, or a block of elements where a rule reads many arrays.
// gpu_runner.cuh does it on a GPU.
#pragma once

#include <algorithm>
#include <array>
#include <span>
#include <utility>

#include "device/kernels/cpu_product.h"
#include "device/kernels/element_rules.h"
#include "device/kernels/exact_terms.h"
#include "device/kernels/instructions.h"
#include "device/kernels/launches.h"
#include "device/kernels/search_rules.h"

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
    if constexpr (requires { Rule::kBlock; }) {
      const Rule rule = given;  // a copy that the loops' stores cannot change
      constexpr int kPart = 64;
      int64_t i = 0;
      for (; i + Rule::kBlock <= count; i += Rule::kBlock) rule.template pack<Rule::kBlock>(i);
      for (; i + kPart <= count; i += kPart) rule.template pack<kPart>(i);
      for (; i < count; ++i) rule.template pack<1>(i);
    } else if constexpr (requires { Rule::kInRows; }) {
      by_richest_instructions([&] { rows(count, given); });
    } else if constexpr (requires { Rule::kComputes; }) {
      by_richest_instructions([&] { loop(count, given); });
    } else {
      loop(count, given);
    }
  }

  // Where rules only look at elements, it looks at blocks of them. Rules that write have to see every element. Of these it says
  // only whether they found something, which is then at 0.
  template <class Rule>
  int64_t first(int64_t count, const Rule& rule) const {
    if constexpr (requires { rule.finds(*rule.values); }) return by_richest_instructions([&] { return find(count, rule); });
    else
      return by_richest_instructions([&] { return find_everywhere(count, rule); });
  }

  template <class Rule>
  void note(int64_t count, const Rule& rule, int64_t offset, int64_t* least) const {
    if (const int64_t place = first(count, rule); place < count) *least = std::min(*least, offset + place);
  }

  void zero(void* target, int64_t bytes) const {
    if (bytes > 0) memset(target, 0, static_cast<size_t>(bytes));
  }

  void copy(void* target, const void* source, int64_t bytes) const {
    if (bytes > 0) memcpy(target, source, static_cast<size_t>(bytes));
  }

  void exact(std::span<const FlatSpan> spans, bool squares, int64_t* counters) const {
    ExactSums sums;
    each_chunk(spans, ExactSums::kTermsMax, [&](const FlatSpan& chunk) {
      if (sums.terms + chunk.count > ExactSums::kTermsMax) sums.move_to(counters);
      sums.add(chunk, squares);
    });
    sums.move_to(counters);
  }

  template <class T>  // of double
  int64_t largest_magnitude_bits(const T* x, int64_t count) const {
    return by_richest_instructions([&] { return find_largest(x, count); });
  }

  bool product(const ExactProduct& product) const { return cpu_product::run(product); }

 private:
  template <class Rule>
  [[gnu::always_inline]] static void loop(int64_t count, const Rule& given) {
    const Rule rule = given;  // as in `each`
    SHARD_VECTORIZE
    for (int64_t i = 0; i < count; ++i) rule.template pack<1>(i);
  }

  template <class Rule>
  [[gnu::always_inline]] static void rows(int64_t count, const Rule& given) {
    const auto rule = given.rule;
    for (int64_t begin = 0, row = 0; begin < count; begin += given.width, ++row) {
      const auto of_row = rule.row(row);
      const int64_t seen = begin + given.seen_of(row);
      SHARD_VECTORIZE
      for (int64_t i = begin; i < seen; ++i) rule.element(of_row, i);
      for (int64_t i = seen; i < begin + given.width; ++i) rule.y[i] = 0;
    }
  }

  template <class Rule>
  [[gnu::always_inline]] static int64_t find(int64_t count, const Rule& given) {
    constexpr int64_t kBlock = 1024;
    const Rule rule = given;
    for (int64_t begin = 0; begin < count; begin += kBlock) {
      const int64_t end = std::min(count, begin + kBlock);
      uint32_t found = 0;
      for (int64_t i = begin; i < end; ++i) found |= static_cast<uint32_t>(rule.finds(rule.values[i]));
      for (int64_t i = begin; found != 0 && i < end; ++i)
        if (rule.finds(rule.values[i])) return i;
    }
    return count;
  }

  template <class Rule>
  [[gnu::always_inline]] static int64_t find_everywhere(int64_t count, const Rule& given) {
    const Rule rule = given;  // as in `each`
    uint64_t found = 0;
    SHARD_VECTORIZE
    for (int64_t i = 0; i < count; ++i) found |= static_cast<uint64_t>(1 - rule.template pack<1>(i));
    return found == 0 ? count : 0;
  }

  template <class T>
  [[gnu::always_inline]] static int64_t find_largest(const T* x, int64_t count) {
    int64_t bits = 0;
    for (int64_t i = 0; i < count; ++i) bits = larger_magnitude(bits, x[i]);
    return bits;
  }

  // Of a rule that computes much for each number it loads, and of looking at numbers that lie in a cache. Nothing is
  // contracted, so all instructions have the same bits.
  template <class Body>
  static auto by_richest_instructions(const Body& body) {
#ifdef SHARD_X86
    static const Instructions richest = richest_instructions();
    if (richest == Instructions::avx512) return with_avx512(body);
    if (richest == Instructions::avx2) return with_avx2(body);
#endif
    return body();
  }
#ifdef SHARD_X86
  template <class Body>
  [[SHARD_AVX512, gnu::flatten]] static auto with_avx512(const Body& body) {
    return body();
  }
  template <class Body>
  [[SHARD_AVX2, gnu::flatten]] static auto with_avx2(const Body& body) {
    return body();
  }
#endif

  // Integers by exponent. Neighbours often have the same exponent. They go into different lanes, so that no addition waits for
  // the one before it.
  struct ExactSums {
    static constexpr int64_t kTermsMax = int64_t{1} << 16;  // each below 2^48
    static constexpr int kSumLanes = 4;
    std::array<std::array<uint64_t, 256>, kSumLanes> at{};
    int64_t terms = 0;

    void add(const FlatSpan& chunk, bool squares) {
      const int64_t whole = chunk.count / kSumLanes * kSumLanes;
      const auto count = [&](int64_t i, size_t lane) {
        const ExactInteger term = exact_integer(chunk.data[i], squares);
        at[lane][term.exponent] += term.integer;
      };
      for (int64_t i = 0; i < whole; i += kSumLanes)
        for (int lane = 0; lane < kSumLanes; ++lane) count(i + lane, static_cast<size_t>(lane));
      for (int64_t i = whole; i < chunk.count; ++i) count(i, 0);
      terms += chunk.count;
    }

    void move_to(int64_t* counters) {
      for (size_t exponent = 0; exponent < 256; ++exponent) {
        uint64_t sum = 0;
        for (auto& lane : at) sum += std::exchange(lane[exponent], 0);
        counters[2 * exponent] += static_cast<int64_t>(sum & 0xffffff);
        counters[2 * exponent + 1] += static_cast<int64_t>(sum >> 24);
      }
      terms = 0;
    }
  };
};

}  // namespace shardproof::SHARD_KERNELS
