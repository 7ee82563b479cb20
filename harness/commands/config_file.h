// The options of a command in a file: TOML without tables, `save-every = 50` for `--save-every 50`.
#pragma once

#include <string>

namespace CLI {
class App;
}

namespace harness {

// Gives the command the options of the file, but for those that the command line gives: it has the last word. Throws Error,
// which names the file, when it cannot be read, has a name that is no option of the command, or has one twice; and CLI's error
// for a value that the option does not take.
void read_config(CLI::App& command, const std::string& path);

// All options of the command with their values, as `read_config` reads them; with `descriptions` as comments.
std::string resolved_config(const CLI::App& command, bool descriptions);

}  // namespace harness
