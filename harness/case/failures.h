// The failure database: minimal cases that failed before, one file each, tried first the next time.
#pragma once

#include <string>
#include <vector>

#include "harness/case/case.h"

namespace harness {

class Failures {
 public:
  explicit Failures(std::string directory) : directory_(std::move(directory)) {}

  // Throws Error when nothing can be written there; leaves nothing. Better known before hours of work than after.
  void require_writable() const;

  // In the order of their names. A file that no longer parses is left out; or, `strict`, is an Error that names it, as is a
  // folder without cases.
  std::vector<Case> all(bool strict = false) const;
  void store(const Case& c, const std::string& what) const;
  // The case holds now.
  void forget(const Case& c) const;

 private:
  std::string path(const Case& c) const;
  std::string directory_;
};

}  // namespace harness
