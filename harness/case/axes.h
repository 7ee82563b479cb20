// The names of mesh axes, here.
#pragma once

#include "shardproof/algebra/axes.h"

namespace harness {

namespace axes = shardproof::axes;

}  // namespace harness
