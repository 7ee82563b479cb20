// Which ranks agree with each other: what those that hold the same elements have after each step.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "harness/case/case.h"
#include "harness/run/ranks.h"

namespace harness {

struct Replicas {
  int64_t step = -1;   // the first after which replicas of a parameter or of optimizer state differ; -1: they never do
  std::string tensor;  // the first of these
  std::vector<std::vector<int64_t>> groups;  // ranks with the same bits of the first element that differs
  int64_t found = -1;  // the first step after which FingerprintCheck (optim/fingerprint_check.h) complains; -1: it never does
};

// Trains the case once more, with the check. An engine has none, so `found` is -1 there. Nothing differs where a rank throws.
Replicas replicas_of(const Case& c, Ranks& ranks = thread_ranks());

// The first step of a run in which replicas differ; `found` is of the complaints that ranks have handed in.
Replicas first_disagreement(const std::vector<std::vector<RankStep>>& steps);

// "after step 1 ranks 0, 2 and ranks 1, 3 hold different bits of layers.0.weight; --check=fingerprint finds it in step 1". ""
// where no replicas differ.
std::string in_words(const Replicas& replicas, bool has_check);

}  // namespace harness
