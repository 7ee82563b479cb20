// From a failing case to a smaller one that fails alike.
#pragma once

#include <chrono>
#include <functional>
#include <vector>

#include "harness/case/case.h"
#include "harness/run/run_case.h"

namespace harness {

// Simpler variants of a case, the largest jumps first: fewer ranks, steps, rounds, layers, sizes, options at their defaults.
// Then smaller ones again with other seeds. All valid. Law: following first candidates always ends.
std::vector<Case> simpler(const Case& c);

struct Shrunk {
  Case minimal;
  Verdict verdict;
  int64_t tried = 0;  // cases that ran, but for those that only several threads try
};

struct ShrinkBudget {
  std::chrono::milliseconds time;
  int64_t runs = 0;     // candidates at most; 0: as many as there is time for
  int64_t threads = 1;  // how many candidates may run at a time
};

// Greedy: takes a simpler variant that fails alike (verdict.h), until none does or the budget is spent. So another failure
// that a variant may have does not take the place of this one. Variants are tried in the order of simpler(), round and round.
// `run` is called by several threads where the budget has them, and the result is the same as with one. It must not throw.
Shrunk shrink(const Case& failing, const Verdict& verdict, const ShrinkBudget& budget,
              const std::function<Verdict(const Case&)>& run);

}  // namespace harness
