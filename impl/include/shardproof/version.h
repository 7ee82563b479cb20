// The version of these headers. CMakeLists.txt and pyproject.toml take the version of the project from here. The umbrella
// header does not include this one, so that a new version does not compile everything again.
#pragma once

#define SHARDPROOF_VERSION "0.1.0"

// The same as a number, for #if: 10000 * major + 100 * minor + patch.
#define SHARDPROOF_VERSION_NUMBER 100

namespace shardproof {

// The version of the library that this process has loaded. It differs from SHARDPROOF_VERSION in a program that was compiled
// with the headers of another version, which is no supported combination.
const char* library_version();

}  // namespace shardproof
