#include "harness/commands/shrink_crash.h"

#include <fmt/format.h>

#include <filesystem>
#include <thread>

#include "harness/commands/process.h"

namespace harness {

Verdict crash_verdict(const Case& c) {
  static const std::string kSays = "CRASH (";
  const std::string program = std::filesystem::read_symlink("/proc/self/exe").string();
  const std::string output =
      output_of(fmt::format("{} replay {} 2>&1 >/dev/null", shell_word(program), shell_word(c.str()))).text;
  const size_t begin = output.find(kSays);
  if (begin == std::string::npos) return held_verdict();
  const size_t name = begin + kSays.size();
  return {.outcome = Verdict::Outcome::crash, .origin = output.substr(name, output.find(')', name) - name)};
}

Shrunk shrink_crash(const Case& crashing, const Verdict& verdict, double seconds, int64_t runs) {
  const ShrinkBudget budget{.time = std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000)),
                            .runs = runs,
                            .threads = [] { return std::max<int64_t>(1, std::thread::hardware_concurrency()); }};
  return shrink(crashing, verdict, budget, crash_verdict);
}

}  // namespace harness
