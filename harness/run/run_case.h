// Runs a case on both sides and compares.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "harness/case/case.h"
#include "harness/run/ranks.h"

namespace harness {

struct Verdict {
  bool held = false;
  std::string what;      // empty when it held; else "step 2: gradient of ..., element [..], on rank 2: golden .., sharded .."
  std::string category;  // its first word: loss, gradient, parameter, a state's name, "property NAME", error, control
  int64_t values_compared = 0;
  double ratio_max = 0;  // fast mode: largest distance from the truth over the unsharded run's
  // It did not hold, but only because the unsharded run is not finite either: the sharded one threw NonFiniteError where it had
  // to, and equals it up to there.
  bool diverged = false;
  // Fast mode, of one case in kMeasuredEvery: the smallest relative error of a gradient, a parameter and an activation that its
  // comparison finds, e.g. "gradient in float32". 2: not even a doubled one.
  std::map<std::string, double> smallest_found = {};
  std::vector<std::string> properties = {};  // those that were asked, when the comparison held
  int64_t steps_clipped = 0, steps_not_clipped = 0, steps_skipped = 0;
  int64_t step = -1;  // the first that differs; -1 where it held, or failed by an error
};

constexpr uint64_t kMeasuredEvery = 64;

// Never throws for what the library under test does wrong: that is a verdict. Every case that held has shown that its
// comparison can fail, by a planted change of one element of the last step.
Verdict run_case(const Case& c, Ranks& ranks = thread_ranks());

}  // namespace harness
