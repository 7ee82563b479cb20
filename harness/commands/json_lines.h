// Results as one JSON object a line, for programs.
#pragma once

#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>

namespace harness {

// The object as one line of ASCII. JSON has its own escapes for other characters, and a text that is no UTF-8, which JSON
// cannot hold, is escaped (base/escape.h).
std::string in_ascii(const nlohmann::json& object);

// Visits each line of a file that `writer` has written, for `option`. Throws Error, naming the file and the line, when it
// cannot be read or has something else.
void read_json_lines(const std::string& path, const std::string& option, const std::string& writer,
                     const std::function<void(const nlohmann::json& line)>& visit);

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
