// Patterns of names of modules.
#pragma once

#include <string_view>

namespace shardproof {

// Whether the name fits the pattern, where * stands for any characters within one part of a name and ** for any: "h.*" is "h.0"
// and "h.1" but not "h.0.mlp".
bool name_matches(std::string_view pattern, std::string_view name);

}  // namespace shardproof
