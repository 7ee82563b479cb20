#include "harness/commands/process.h"

#include <array>
#include <cstdio>

#include "shardproof/base/check.h"

namespace harness {

ProcessOutput output_of(const std::string& command) {
  FILE* const pipe = popen(command.c_str(), "r");
  SHARD_REQUIRE(pipe, "process", "cannot start {}", command);
  ProcessOutput output;
  std::array<char, 65536> buffer;
  while (const size_t count = fread(buffer.data(), 1, buffer.size(), pipe)) output.text.append(buffer.data(), count);
  output.status = pclose(pipe);
  return output;
}

std::string shell_word(const std::string& text) {
  std::string word = "'";
  for (const char letter : text) word += letter == '\'' ? "'\\''" : std::string(1, letter);
  return word + "'";
}

}  // namespace harness
