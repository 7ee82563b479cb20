// A picture of a planned step: what lies in memory, and what runs when.
#pragma once

#include <string>

#include "harness/plan/dry_run.h"
#include "harness/plan/svg.h"
#include "harness/plan/timeline.h"

namespace harness {

// A bar of memory at its peak by kind, and a row for operators and for the collectives of each group, over the step's time.
// What is narrower than a pixel is joined with its neighbours.
Svg plot_step(const DryRunResult& run, const StepTime& time, double memory_of_rank, const std::string& title);

// 0.00123 as "1.23 ms".
std::string seconds_text(double seconds);

}  // namespace harness
