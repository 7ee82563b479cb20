// The program `shardproof`, for programs of your own that register strategies and properties before they run it:
//
//   int main(int argc, char** argv) {
//     shardproof::register_strategy(...);
//     harness::register_property(...);
//     return harness::run_program(argc, argv);   // verify, replay, train, plan and checkpoint, as `shardproof` has them
//   }
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace harness {

// Adds a command, whose body sets the exit code.
using AddCommand = std::function<void(CLI::App& app, int& exit_code)>;

// Returns the exit code: 0 if all held; 1 for a counterexample, a failed check or NaN; 2 for wrong usage, an environment that
// cannot run this, or an interruption before all was done; 75 for a run of `train` that was stopped as somebody asked. A crash
// while a case of `verify` or `replay` runs ends the process with 1 as well (crash_report.h).
int run_program(int argc, char** argv, const std::vector<AddCommand>& more = {});

// As the program was called, for lines that a reader may paste; build/shardproof where it was not called through run_program.
std::string program_name();

}  // namespace harness
