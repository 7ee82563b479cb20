// What a command says when the code under test crashes while a case runs.
#pragma once

#include <string>

namespace harness {

// From now on SIGABRT, which std::terminate raises as well, SIGBUS, SIGFPE, SIGILL and SIGSEGV print the replay line of each
// case that runs (harness/run/running_cases.h) to standard error, that of the crashed thread first. Then the process ends with
// exit code 1, since a crash is a counterexample; where a debugger or a library had a handler of its own, that one is called. A
// crash while no case runs ends the process as it would have before. The crashed thread's case, or all cases where it has none,
// also become failures in `json`, a file of JsonLines; "": none. `replay` is what stands before a case in its replay line.
void report_crashes(const std::string& replay, const std::string& json = "");

}  // namespace harness
