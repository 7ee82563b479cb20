#include "harness/commands/program.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <torch/version.h>
#include <unistd.h>

#include <CLI/CLI.hpp>

#include "harness/commands/commands.h"
#include "harness/commands/launch_options.h"
#include "harness/commands/usage.h"
#include "harness/run/message.h"
#include "shardproof/base/check.h"
#include "shardproof/base/failed_check.h"
#include "shardproof/version.h"

namespace harness {
namespace {

std::string& called() {
  static std::string name = "build/shardproof";
  return name;
}

int complain(const std::exception& error, int code) {
  fmt::print(stderr, "shardproof: {}\n", message_of(error));
  return code;
}

// Files that are opened later would take the places of standard input and output that the caller has closed, and get what is
// written there.
void fill_standard_places() {
  for (const int place : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO})
    if (::fcntl(place, F_GETFD) < 0) ::open("/dev/null", O_RDWR);
}

}  // namespace

std::string program_name() { return called(); }

int run_program(int argc, char** argv, const std::vector<AddCommand>& more) {
  CLI::App app("Sharded training, and its proof: random models on random meshes against unsharded golden runs");
  app.require_subcommand(1);
  app.set_version_flag("--version", fmt::format("shardproof {}, LibTorch {}", shardproof::library_version(), TORCH_VERSION),
                       "print the versions of this program and of LibTorch, and exit");
  int exit_code = 0;
  fill_standard_places();
  ::signal(SIGXFSZ, SIG_IGN);  // a write beyond a limit on file sizes is an error then, which names the file
  called() = argv[0];
  remember_arguments(argc, argv);
  add_verify_command(app, exit_code);
  add_replay_command(app, exit_code);
  add_train_command(app, exit_code);
  add_sample_command(app, exit_code);
  add_plan_command(app, exit_code);
  for (const AddCommand& add : more) add(app, exit_code);
  add_checkpoint_command(app, exit_code);
  add_completion_command(app);
  add_examples(app);
  try {
    app.parse(argc, argv);
    return exit_code;
  } catch (const CLI::Success& success) {
    return app.exit(success);
  } catch (const CLI::ParseError& error) {
    app.exit(error);
    fmt::print(stderr, "{}", suggestions(app));
    return 2;
  } catch (const shardproof::NonFiniteError& error) {
    return complain(error, 1);
  } catch (const shardproof::FailedCheck& error) {
    return complain(error, 1);
  } catch (const std::exception& error) {
    return complain(error, 2);
  }
}

}  // namespace harness
