// What the command says about itself: examples below --help, what a mistyped word may have meant, and completion for shells.
#pragma once

#include <string>

namespace CLI {
class App;
}

namespace harness {

// Adds examples to the help of every command. Call it when all commands are there.
void add_examples(CLI::App& app);

// Adds --quiet, and --verbose where something is said about it. See harness/run/verbosity.h.
void add_verbosity(CLI::App& command, const std::string& quiet, const std::string& verbose = "");

// Adds `completion SHELL`, which prints a script that completes commands, options and their values.
void add_completion_command(CLI::App& app);

// After a failed parse: which option or command was probably meant, one line for each word that was not understood.
std::string suggestions(const CLI::App& app);

}  // namespace harness
