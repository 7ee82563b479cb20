// Values that matter only beside certain others, which chance seldom brings: a bug that needs all of them would be found by
// luck.
#pragma once

#include "harness/case/case.h"
#include "harness/case/random.h"

namespace harness {

// A case that could have a group of such values gets it with a chance of that group's own. Its mesh and its strategy stay.
void bring_together(Chooser choose, Case& c);

// Whether hardly all documents of a batch are of one token, whose query sees itself alone: the gradient of its score is then a
// rounding, which the mode fast cannot judge.
bool has_long_documents(const golden::Llama& llama);

}  // namespace harness
