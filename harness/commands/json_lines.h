// Results as one JSON object a line, for programs.
#pragma once

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

namespace harness {

// The object as one line of ASCII. JSON has its own escapes for other characters, and a text that is no UTF-8, which JSON
// cannot hold, is escaped (base/escape.h).
std::string in_ascii(const nlohmann::json& object);

class JsonLines {
 public:
  // "": writes nothing. Throws Error when the file cannot be written.
  explicit JsonLines(const std::string& path);
  // The line, in ASCII, is on disk when this returns, so that an interrupted run leaves whole lines.
  void write(const nlohmann::json& object);

 private:
  std::string path_;
  std::ofstream file_;
};

}  // namespace harness
