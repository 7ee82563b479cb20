#include "shardproof/base/name_pattern.h"

namespace shardproof {

bool name_matches(std::string_view pattern, std::string_view name) {
  if (pattern.empty()) return name.empty();
  if (pattern.starts_with("**")) {
    for (size_t skip = 0; skip <= name.size(); ++skip)
      if (name_matches(pattern.substr(2), name.substr(skip))) return true;
    return false;
  }
  if (pattern[0] == '*') {
    for (size_t skip = 0; skip <= name.size() && (skip == 0 || name[skip - 1] != '.'); ++skip)
      if (name_matches(pattern.substr(1), name.substr(skip))) return true;
    return false;
  }
  return !name.empty() && pattern[0] == name[0] && name_matches(pattern.substr(1), name.substr(1));
}

}  // namespace shardproof
