// How much a command says to a person. Verdicts, warnings and errors are said in any case, and files hold everything.
#pragma once

namespace harness {

enum class Verbosity { quiet, normal, verbose };

// Of this process.
inline Verbosity& verbosity() {
  static Verbosity chosen = Verbosity::normal;
  return chosen;
}

}  // namespace harness
