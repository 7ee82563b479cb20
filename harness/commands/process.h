// Other programs, run by the shell.
#pragma once

#include <string>

namespace harness {

struct ProcessOutput {
  std::string text;  // what it wrote to standard output
  int status = 0;    // as wait(2) gives it; 0: it ended with exit code 0
};

// Runs the command and waits for its end. Throws Error where it cannot be started.
ProcessOutput output_of(const std::string& command);

// The text as one word of a command.
std::string shell_word(const std::string& text);

}  // namespace harness
