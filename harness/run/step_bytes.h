// A rank's steps as bytes, to be sent to who compares them.
#pragma once

#include <string>
#include <vector>

#include "harness/compare/step_exchange.h"

namespace harness {

std::string to_bytes(const std::vector<RankStep>& steps);
std::vector<RankStep> steps_from(const std::string& bytes);

}  // namespace harness
