#include "harness/launch_options.h"

#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>

namespace harness {
namespace {

std::vector<std::string>& remembered() {
  static std::vector<std::string> arguments;
  return arguments;
}

// argv but --ranks N or --ranks=N.
std::vector<std::string> without_ranks(const std::vector<std::string>& arguments) {
  std::vector<std::string> kept;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i] == "--ranks")
      ++i;
    else if (!arguments[i].starts_with("--ranks="))
      kept.push_back(arguments[i]);
  }
  return kept;
}

}  // namespace

void remember_arguments(int argc, char** argv) {
  remembered().assign(argv, argv + argc);
}

void Launched::add_to(CLI::App& command, bool ranks_option) {
  command.add_option("--backend", options.backend, "threads of this process, or mpi: processes")->capture_default_str();
  command.add_option("--device", options.device, "cpu")->capture_default_str();
  if (ranks_option) command.add_option("--ranks", options.ranks, "with --backend mpi: start so many processes, without mpirun");
  command.add_option("--timeout", mpi.timeout_seconds, "seconds that ranks wait for one of them, with --backend mpi")
      ->capture_default_str();
  command.add_option("--flight-dir", mpi.flight_directory,
                     "where each rank leaves its last calls if it fails, with --backend mpi");
}

std::unique_ptr<shardproof::MpiWorld> Launched::start(const std::string& mesh) {
  SHARD_REQUIRE(mpi.timeout_seconds > 0, "launch", "--timeout must be above 0, got {}", mpi.timeout_seconds);
  const std::vector<std::string> own = without_ranks(remembered());
  shardproof::launch(options, own);
  if (options.backend != "mpi") return nullptr;
  at::set_num_threads(1);
  auto world = std::make_unique<shardproof::MpiWorld>(mpi);
  world->run([&](std::shared_ptr<shardproof::Comm> comm) {
    shardproof::require_same(*comm, {{"program", shardproof::program_hash()},
                                     {"command line", fmt::format("{}", fmt::join(own.begin() + 1, own.end(), " "))},
                                     {"mesh", mesh}});
  });
  return world;
}

}  // namespace harness
