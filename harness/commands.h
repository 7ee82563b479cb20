// The subcommands of `shardproof`. Each adds itself to the application; when it is the one chosen it runs
// while the command line is parsed and leaves its exit code: 0 good, 1 a difference or a NaN. Errors of the
// caller are thrown.
#pragma once

namespace CLI {
class App;
}

namespace harness {

void add_train_command(CLI::App& app, int& exit_code);

}  // namespace harness
