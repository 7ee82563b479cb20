// Runs a case on both sides and compares.
#pragma once

#include <cstdint>

#include "harness/case/case.h"
#include "harness/run/ranks.h"
#include "harness/run/verdict.h"

namespace harness {

constexpr uint64_t kMeasuredEvery = 64;

// Never throws for what the library under test does wrong: that is a verdict. Every case that held has shown that its
// comparison can fail, by a planted change of one element of the last step.
Verdict run_case(const Case& c, Ranks& ranks = thread_ranks());

}  // namespace harness
