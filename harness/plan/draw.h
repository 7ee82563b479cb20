// A picture of layouts: which rank owns which elements of parameters, gradients and state.
#pragma once

#include <map>
#include <string>

#include "harness/plan/svg.h"
#include "shardproof/sharding/piece.h"

namespace harness {

// A column for each rank, a row for each kind of parameter: of those with one shape and one layout, the first. What a rank
// holds of the tensor is filled. Rows of a matrix run down, its columns to the right. It shows at most 32 ranks and 16 kinds,
// and says so.
Svg draw_layouts(const std::map<std::string, shardproof::ParameterPlacement>& placements, const std::string& title);

}  // namespace harness
