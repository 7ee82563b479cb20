// The golden run itself is checked by PyTorch in embedded Python, on a sample of the cases, beside them.
#pragma once

#include <atomic>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "harness/case/case.h"

namespace harness {

// The tolerance is derived: how far the float32 run is from the float64 run, in the Frobenius norm, says how much the case
// amplifies rounding. Two float64 programs may be this many times as far apart, scaled by the ratio of the precisions.
constexpr double kOracleFactor = 64;

// Whether the case is one that the oracle compares: layer norms over at least three features, since those over fewer turn
// rounding into values.
bool suits_oracle(const Case& c);

// The first tensor on which the two float64 runs differ, or nothing. Throws golden::EnvironmentError without Python.
std::optional<std::string> oracle_difference(const Case& c);

// Compares cases on a thread of its own, one of each kind (model, ties, optimizer, momentum, decay, clipping).
class Oracle {
 public:
  // Returns when Python is there.
  explicit Oracle(std::vector<Case> cases);
  ~Oracle();

  struct Outcome {
    int64_t compared = 0;
    std::vector<std::pair<Case, std::string>> differences;
  };
  // Whether it stopped early, without Python.
  bool failed() const { return failed_; }
  // Waits for the end of all cases, or of the current one when `cut_short`. Rethrows an EnvironmentError.
  Outcome finish(bool cut_short);

 private:
  void tell_that_python_is_there();

  std::vector<Case> cases_;
  std::atomic<bool> stop_{false}, failed_{false}, python_is_there_{false};
  Outcome outcome_;
  std::exception_ptr error_;
  std::thread thread_;
};

// Of these cases the first of each kind.
std::vector<Case> one_of_each_kind(const std::vector<Case>& cases);

}  // namespace harness
