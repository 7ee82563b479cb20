// What a campaign draws from.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "harness/case/case.h"

namespace harness {

struct Limits {
  std::optional<std::string> strategy = {};   // only this one
  std::optional<shardproof::Mesh> mesh = {};  // only this one
  std::optional<Mode> mode = {};              // only this one
  int64_t world_max = 8;
  bool above_ten = false;  // some cases that save have 11 to 14 ranks, whatever world_max says
  bool tiny = false;       // only the small MLP that other frameworks' parity tests use: 4 ranks, zero3, 3 AdamW steps
};

}  // namespace harness
