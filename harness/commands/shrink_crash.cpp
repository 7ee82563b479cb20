#include "harness/commands/shrink_crash.h"

#include <fmt/format.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <thread>

#include "shardproof/base/check.h"

namespace harness {
namespace {

// One word of a shell.
std::string quoted(const std::string& text) {
  std::string word = "'";
  for (const char letter : text) word += letter == '\'' ? "'\\''" : std::string(1, letter);
  return word + "'";
}

}  // namespace

Verdict crash_verdict(const Case& c) {
  static const std::string kSays = "CRASH (";
  const std::string program = std::filesystem::read_symlink("/proc/self/exe").string();
  const std::string command = fmt::format("{} replay {} 2>&1 >/dev/null", quoted(program), quoted(c.str()));
  FILE* const pipe = popen(command.c_str(), "r");
  SHARD_REQUIRE(pipe, "replay", "cannot start {}", command);
  std::string output;
  std::array<char, 4096> buffer;
  while (const size_t count = fread(buffer.data(), 1, buffer.size(), pipe)) output.append(buffer.data(), count);
  pclose(pipe);
  Verdict verdict;
  const size_t begin = output.find(kSays);
  verdict.held = begin == std::string::npos;
  if (verdict.held) return verdict;
  const size_t name = begin + kSays.size();
  verdict.what = fmt::format("crash ({})", output.substr(name, output.find(')', name) - name));
  verdict.category = verdict.what;
  return verdict;
}

Shrunk shrink_crash(const Case& crashing, const Verdict& verdict, double seconds, int64_t runs) {
  const ShrinkBudget budget{.time = std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000)),
                            .runs = runs,
                            .threads = [] { return std::max<int64_t>(1, std::thread::hardware_concurrency()); }};
  return shrink(crashing, verdict, budget, crash_verdict);
}

}  // namespace harness
