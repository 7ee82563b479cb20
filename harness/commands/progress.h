// One line that says how far a long run is: rewritten in place on a terminal, printed every few seconds elsewhere.
#pragma once

#include <chrono>
#include <string>

namespace harness {

class Progress {
 public:
  Progress();
  // Shows the line if the last one is old enough. `fraction` in [0, 1].
  void show(double fraction, const std::string& text);
  // Clears the line, so that something else can be printed.
  void clear();
  double seconds() const;

 private:
  bool terminal_;
  std::chrono::steady_clock::time_point start_, next_;
};

}  // namespace harness
