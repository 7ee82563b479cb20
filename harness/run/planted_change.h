// The change that every case plants into its own result, once that has held: a comparison that does not see it sees nothing.
#pragma once

#include <string>
#include <vector>

#include "harness/case/case.h"
#include "harness/run/sharded_run.h"

namespace harness {

// Changes the longest piece of the parameter that some rank has; one rank must have elements of it. The lowest bit of one
// element is flipped; in the mode fast all elements move away from 0 instead, by a share of their size and of 1.
void plant_change(const Case& c, const std::string& parameter, std::vector<RankStep>& ranks);

}  // namespace harness
