// Environments of processes, as launchers would set them.
#pragma once

#include <map>
#include <string>

#include "shardproof/launch/launch.h"

namespace shardproof {

using Variables = std::map<std::string, std::string>;

inline Environment environment(const Variables& variables) {
  return [variables](const char* name) -> const char* {
    const auto found = variables.find(name);
    return found == variables.end() ? nullptr : found->second.c_str();
  };
}

}  // namespace shardproof
