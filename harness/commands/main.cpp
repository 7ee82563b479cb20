// build/shardproof. Exit codes: 0 all held (of what ran, when interrupted); 1 a counterexample, a failed check, NaN; 2 usage
// or environment.
#include <fmt/format.h>
#include <torch/version.h>

#include <CLI/CLI.hpp>

#include "harness/commands/commands.h"
#include "harness/commands/launch_options.h"
#include "harness/commands/usage.h"
#include "harness/run/message.h"
#include "shardproof/base/check.h"
#include "shardproof/version.h"

namespace {

int complain(const std::exception& error, int code) {
  fmt::print(stderr, "shardproof: {}\n", harness::message_of(error));
  return code;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Sharded training, and its proof: random models on random meshes against unsharded golden runs");
  app.require_subcommand(1);
  app.set_version_flag("--version", fmt::format("shardproof {}, LibTorch {}", shardproof::library_version(), TORCH_VERSION),
                       "print the versions of this program and of LibTorch, and exit");
  int exit_code = 0;
  harness::remember_arguments(argc, argv);
  harness::add_verify_command(app, exit_code);
  harness::add_replay_command(app, exit_code);
  harness::add_train_command(app, exit_code);
  harness::add_plan_command(app, exit_code);
  harness::add_bench_command(app, exit_code);
  harness::add_checkpoint_command(app, exit_code);
  harness::add_completion_command(app);
  harness::add_examples(app);
  try {
    app.parse(argc, argv);
    return exit_code;
  } catch (const CLI::Success& success) {
    return app.exit(success);
  } catch (const CLI::ParseError& error) {
    app.exit(error);
    fmt::print(stderr, "{}", harness::suggestions(app));
    return 2;
  } catch (const shardproof::NonFiniteError& error) {
    return complain(error, 1);
  } catch (const std::exception& error) {
    return complain(error, 2);
  }
}
