// Files that a program finds by where it lies itself.
#pragma once

#include <filesystem>

namespace harness {

// `path`, as seen from the folder of this process' program; one that begins at the root is what it is. A build that may be
// moved elsewhere names its folders like this (SHARDPROOF_RELOCATABLE).
inline std::filesystem::path beside_program(const std::filesystem::path& path) {
  return std::filesystem::read_symlink("/proc/self/exe").parent_path() / path;
}

}  // namespace harness
