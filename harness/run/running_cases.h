// Which cases run in this process now, so that a crash can say which they were.
#pragma once

#include <signal.h>

#include <string>

namespace harness {

namespace running {
struct Entry;
}

// This thread works on that case as long as the object lives. Objects of one thread are nested, and the innermost counts. While
// it lives, the thread also has a stack of its own for signal handlers, since it may crash by using up its usual stack.
class RunningCase {
 public:
  explicit RunningCase(const std::string& text);
  ~RunningCase();
  RunningCase(const RunningCase&) = delete;
  RunningCase& operator=(const RunningCase&) = delete;

 private:
  running::Entry* entry_;
  stack_t stack_before_{};
};

// Signal handlers call these two, so they neither lock nor allocate. The first returns the case of the thread with that number,
// and "" where it has none. The second calls `tell` once for each different case, beginning with that of the thread.
const char* running_case_of(int thread);
void each_running_case(int thread, void (*tell)(const char* text, void* with), void* with);

}  // namespace harness
