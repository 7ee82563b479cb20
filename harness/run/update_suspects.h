// Mistakes of the optimizer as values: what parameters and state would be under another rule, other groups or another rate.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

#include "golden/golden.h"
#include "harness/run/suspects.h"

namespace harness {

// The tensors of one kind that a step leaves, such as the parameters; null where it leaves none.
using TensorsOf = std::function<const golden::Named*(const golden::StepTrace&)>;

// What that step of the run leaves under each mistake that its optimizer and its rates allow, in the order of `names`.
std::vector<Suspect> update_suspects(const golden::Run& run, size_t step, const TensorsOf& tensors, const golden::Named& names);

}  // namespace harness
