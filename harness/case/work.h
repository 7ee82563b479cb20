// How much a case computes, and less of it.
#pragma once

#include <cstdint>

#include "harness/case/case.h"
#include "harness/case/random.h"

namespace harness {

// Calls of operators in all forwards and backwards of all ranks, roughly: what a case of small tensors takes its time for. On
// one of two busy cores 1,000 of them take about 160 ms, the golden run and the comparison included.
int64_t work_of(const Case& c);

// Nineteen of twenty cases with more work than kWorkMax get less: a few steps are left out and a few rounds of accumulation,
// chosen at random, until the rest is below the limit or as short as kStepsLeft and kRoundsLeft say. Steps with a checkpoint go
// last. A transformer that is still above it keeps kLayersLeft. Without that a twentieth of the cases takes a third of a
// campaign's time, and finds no more than as many short ones.
void bound_work(Chooser choose, Case& c);
constexpr int64_t kWorkMax = 500;
constexpr int64_t kStepsLeft = 2, kRoundsLeft = 2, kLayersLeft = 2;

}  // namespace harness
