// Values that matter only beside certain others, which chance seldom brings: a bug that needs all of them would be found by
// luck.
#pragma once

#include "harness/case/case.h"
#include "harness/case/random.h"

namespace harness {

// Where a case has some of such values, gives it the others with a chance of its own.
void bring_together(Chooser choose, Case& c);

}  // namespace harness
