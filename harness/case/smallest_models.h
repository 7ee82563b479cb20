// The smallest models for a case, which shrinking tries before anything else: most bugs need a parameter and little more.
#pragma once

#include <vector>

#include "harness/case/case.h"

namespace harness {

// The case with the smallest mlp, odd model, gpt and llama that its meshes allow, in this order, up to its own kind, and of
// that one only where it is smaller than what the case has; a conv is behind all of them. Options stay where the model has a
// use for them, and are left out elsewhere. All are valid. Law: following any of them, again and again, always ends.
std::vector<Case> with_smallest_models(const Case& c);

}  // namespace harness
