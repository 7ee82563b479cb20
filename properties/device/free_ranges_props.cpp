// Free ranges of memory, beside a plain array that says of each unit of it whether it is free.
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "properties/kit/expect_error.h"
#include "shardproof/base/check.h"
#include "testing/device/free_ranges.h"

using namespace shardproof;

namespace {

constexpr size_t kUnits = 64, kUnitBytes = 4096;

using Range = std::pair<size_t, size_t>;  // first unit, and how many

// The memory that is counted with. Nobody reads it.
char* address(size_t unit) {
  return reinterpret_cast<char*>(uintptr_t{1} << 30) + unit * kUnitBytes;
}

std::vector<Range> free_runs(const std::vector<bool>& is_free) {
  std::vector<Range> runs;
  for (size_t unit = 0; unit < is_free.size(); ++unit) {
    if (!is_free[unit]) continue;
    if (unit == 0 || !is_free[unit - 1]) runs.emplace_back(unit, 0);
    ++runs.back().second;
  }
  return runs;
}

// The lowest of the smallest runs that have so many units.
std::optional<Range> best_of(const std::vector<Range>& runs, size_t units) {
  std::optional<Range> best;
  for (const Range& run : runs)
    if (run.second >= units && (!best || run.second < best->second)) best = run;
  return best;
}

void expect_ranges(const FreeRanges& ranges, const std::vector<bool>& is_free) {
  std::vector<Range> listed;
  ranges.each([&](char* begin, size_t bytes) {
    listed.emplace_back(static_cast<size_t>(begin - address(0)) / kUnitBytes, bytes / kUnitBytes);
  });
  RC_ASSERT(listed == free_runs(is_free));
  RC_ASSERT(ranges.bytes() == kUnitBytes * static_cast<size_t>(std::count(is_free.begin(), is_free.end(), true)));
  for (size_t unit = 0; unit <= kUnits; ++unit) {
    size_t before = 0;
    if (unit == kUnits || !is_free[unit])
      while (before < unit && is_free[unit - 1 - before]) ++before;
    RC_ASSERT(ranges.bytes_before(address(unit)) == before * kUnitBytes);
  }
}

RC_GTEST_PROP(FreeRanges, a_request_gets_the_smallest_range_that_has_it_and_ranges_that_touch_become_one, ()) {
  FreeRanges ranges;
  std::vector<bool> is_free(kUnits, false);
  std::vector<Range> used;  // what is given next, in pieces
  for (size_t unit = 0; unit < kUnits; unit += 4) used.emplace_back(unit, 4);
  const auto steps = *rc::gen::inRange(20, 120);
  for (int step = 0; step < steps; ++step) {
    if (!used.empty() && *rc::gen::inRange(0, 5) < 3) {
      const auto which = *rc::gen::inRange<size_t>(0, used.size());
      const auto [first, units] = used[which];
      used.erase(used.begin() + static_cast<std::ptrdiff_t>(which));
      ranges.give(address(first), units * kUnitBytes);
      std::fill_n(is_free.begin() + static_cast<std::ptrdiff_t>(first), units, true);
    } else {
      const auto units = *rc::gen::inRange<size_t>(1, 10);
      const std::optional<Range> best = best_of(free_runs(is_free), units);
      RC_ASSERT(ranges.take(units * kUnitBytes) == (best ? address(best->first) : nullptr));
      if (best) {
        used.emplace_back(best->first, units);
        std::fill_n(is_free.begin() + static_cast<std::ptrdiff_t>(best->first), units, false);
      }
    }
    expect_ranges(ranges, is_free);
  }
}

TEST(FreeRanges, what_is_free_cannot_be_given_again) {
  FreeRanges ranges;
  ranges.give(address(4), 4 * kUnitBytes);
  for (const auto& [first, units] : std::vector<Range>{{4, 4}, {3, 2}, {7, 1}, {7, 3}, {5, 2}, {2, 9}})
    EXPECT_THROW(ranges.give(address(first), units * kUnitBytes), BrokenInvariant) << first << ", " << units;
  EXPECT_EQ(ranges.bytes(), 4 * kUnitBytes);
  ranges.give(address(3), kUnitBytes);
  ranges.give(address(8), kUnitBytes);
  EXPECT_EQ(ranges.bytes(), 6 * kUnitBytes);
}

}  // namespace
