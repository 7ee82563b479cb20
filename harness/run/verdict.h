// What became of a case.
#pragma once

#include <cstdint>
#include <exception>
#include <map>
#include <string>
#include <vector>

#include "harness/compare/difference.h"

namespace harness {

struct Verdict {
  enum class Outcome {
    held,
    values,    // some value differs
    property,  // a claim about the run (property.h) does not hold
    schedule,  // other bits with another order of threads and completions
    control,   // the comparison noticed no planted change
    error,     // the sharded run threw
    crash,     // it ended its process
    diverged   // the unsharded run is not finite either: the sharded one threw NonFiniteError where it had to, and equals it
               // up to there
  };
  Outcome outcome = Outcome::error;
  int64_t step = -1;           // values: the first that differ, in this step from 0
  Difference difference = {};  // values
  std::string origin = {};     // property: its name; error: what it is known by; crash: the signal
  std::string says = {};       // of the others what happened, in words

  int64_t values_compared = 0;
  double ratio_max = 0;  // fast mode: largest distance from the truth over the unsharded run's
  // Fast mode, of one case in kMeasuredEvery: the smallest relative error of a gradient, a parameter and an activation that its
  // comparison finds, e.g. "gradient in float32". 2: not even a doubled one.
  std::map<std::string, double> smallest_found = {};
  std::vector<std::string> properties = {};  // those that were asked, when the comparison held
  int64_t steps_clipped = 0, steps_not_clipped = 0, steps_skipped = 0;

  bool held() const { return outcome == Outcome::held; }
  bool diverged() const { return outcome == Outcome::diverged; }

  // By what failures of one cause are told from others: "values" whichever differ, "property NAME", "error ORIGIN".
  std::string kind() const;
  // "step 2: gradient of ..., element [..], on rank 2: golden .., sharded .."; empty when it held.
  std::string str() const;
};

Verdict held_verdict();
Verdict verdict_on(const std::exception& error);

// Whether both failed in the same way: the same value (a norm is another than a gradient), property or error.
bool fails_alike(const Verdict& one, const Verdict& other);

}  // namespace harness
