// From a failing case to a smaller one that fails alike.
#pragma once

#include <chrono>
#include <functional>
#include <vector>

#include "harness/case/case.h"
#include "harness/run/run_case.h"

namespace harness {

// Simpler variants of a case, the largest jumps first: fewer ranks, steps, rounds, layers, sizes, options at their defaults.
// All valid. Law: following first candidates always ends.
std::vector<Case> simpler(const Case& c);

struct Shrunk {
  Case minimal;
  Verdict verdict;
  int64_t tried = 0;
};

// Greedy: takes the first simpler variant that fails in the same category, until none does or the time is up.
Shrunk shrink(const Case& failing, const Verdict& verdict, std::chrono::milliseconds budget,
              const std::function<Verdict(const Case&)>& run);

}  // namespace harness
