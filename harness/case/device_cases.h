// What of a case a device other than the CPU can run.
#pragma once

#include "golden/golden.h"

namespace harness {

// Whether canonical arithmetic in such a model needs only what a device has (canonical_ops): no functions of the C library.
bool canonical_on_a_device(const golden::Model& model);

}  // namespace harness
