#include "harness/commands/verify_options.h"

#include <fmt/format.h>

#include "harness/commands/program.h"

namespace harness {

std::string replay_words(const VerifyOptions& options) {
  const std::string engine = options.engine ? fmt::format("--engine {} ", options.engine->name()) : "";
  const std::string backend = options.backend.empty() ? "" : fmt::format("--backend {} ", options.backend);
  return fmt::format("{} replay {}{}", program_name(), engine, backend);
}

std::string replay_line(const Case& c, const VerifyOptions& options) {
  return fmt::format("{}'{}'", replay_words(options), c.str());
}

}  // namespace harness
