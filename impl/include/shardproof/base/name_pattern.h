// Patterns for the names of modules.
#pragma once

#include <string_view>

namespace shardproof {

// Whether the name matches the pattern. In a pattern, * stands for any characters but dots, and ** for any characters: "h.*"
// matches "h.0" and "h.1" but not "h.0.mlp".
bool name_matches(std::string_view pattern, std::string_view name);

}  // namespace shardproof
