// What a failed case looks like. A failure says which value differs first; this says how: which tensors are wrong on which
// ranks, and which common mistake makes the same values. The mistakes are computed from golden runs, microbatch by microbatch.
#pragma once

#include <string>

#include "harness/case/case.h"
#include "harness/run/ranks.h"
#include "harness/run/run_case.h"

namespace harness {

struct Explanation {
  std::string where;  // "step 1: 2 of 4 gradients are wrong, layers.1.weight first, on ranks 1 and 3 of 4"
  // The first module that differs (module_difference.h), or that none does. It is "" where losses and gradients are right,
  // where they are only rounded in another way (unless arithmetic is canonical), and where ranks are not threads.
  std::string first = {};
  // Which ranks agree with each other, where ranks that hold the same elements have different bits (replicas.h); else "".
  std::string replicas = {};
  std::string guess;  // "the terms of data-parallel rank 1 are missing"; "" when no mistake that is known here fits
};

// Whether a failure is of values, or an error: complaints of properties and schedules say themselves what is wrong.
bool may_explain(const Verdict& verdict);

// Trains a case that failed on both sides once more, and every microbatch of the failing step by itself. Where it ends in an
// error, all texts but the guess are empty.
Explanation explain(const Case& c, Ranks& ranks = thread_ranks());

// "  where    ...\n  first    ...\n  replicas ...\n  guess    ...\n", without the lines that say nothing.
std::string in_lines(const Explanation& explanation);

}  // namespace harness
