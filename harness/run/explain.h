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

// Trains a case that failed with `outcome` on both sides once more, and every microbatch of the failing step by itself. An
// error has a guess at most; where values differed and the case now ends in an error, `where` is that error. There is nothing
// to add to the other outcomes, which say themselves what is wrong.
Explanation explain(const Case& c, Verdict::Outcome outcome, Ranks& ranks = thread_ranks());

// "  where    ...\n  first    ...\n  replicas ...\n  guess    ...\n", without the lines that say nothing.
std::string in_lines(const Explanation& explanation);

}  // namespace harness
