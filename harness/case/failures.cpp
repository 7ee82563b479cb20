#include "harness/case/failures.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "harness/case/random.h"
#include "shardproof/base/check.h"

namespace harness {

namespace fs = std::filesystem;

std::string Failures::path(const Case& c) const {
  return (fs::path(directory_) / fmt::format("{:016x}.case", Draws(0, c.str()).bits(0))).string();
}

std::vector<Case> Failures::all(bool strict) const {
  std::vector<fs::path> paths;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(directory_, ignored))
    if (entry.path().extension() == ".case") paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  std::vector<Case> cases;
  for (const fs::path& path : paths) {
    std::ifstream file(path);
    std::string line;
    std::getline(file, line);
    try {
      cases.push_back(Case::parse(line));
    } catch (const shardproof::Error& error) {
      if (strict) throw shardproof::Error(fmt::format("[corpus] {}: {}", path.string(), error.what()));
      // Written by another version; verify can still find the failure anew.
    }
  }
  SHARD_REQUIRE(!strict || !cases.empty(), "corpus", "there is no file *.case in {}; give --corpus a folder that has some",
                directory_);
  return cases;
}

void Failures::store(const Case& c, const std::string& what) const {
  std::error_code error;
  fs::create_directories(directory_, error);
  std::ofstream file(path(c));
  file << c.str() << "\n" << what << "\n";
  SHARD_REQUIRE(file.good(), "failures", "cannot write {}; choose another place with --failures DIR", path(c));
}

void Failures::require_writable() const {
  const fs::path probe = fs::path(directory_) / "probe";
  std::error_code error;
  const bool made = fs::create_directories(directory_, error);
  const bool writable = (std::ofstream(probe) << "writable\n").flush().good();
  fs::remove(probe, error);
  if (made) fs::remove(directory_, error);  // there is nothing to store yet
  SHARD_REQUIRE(writable, "failures", "cannot write into {}; choose another place with --failures DIR", directory_);
}

void Failures::forget(const Case& c) const {
  std::error_code ignored;
  fs::remove(path(c), ignored);
}

}  // namespace harness
