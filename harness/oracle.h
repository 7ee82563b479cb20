// The golden run itself is checked by PyTorch in embedded Python, on a sample of the cases, beside them.
#pragma once

#include <atomic>
#include <exception>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "harness/case.h"

namespace harness {

// Relative distance, in Frobenius norm, that two float64 programs may have after a few steps. Rounding of 1e-16 is
// amplified by layer norms over few features and by AdamW's division by small roots, not to this; a wrong formula is far above.
constexpr double kOracleDistanceMax = 1e-6;

// Whether the case is one that the oracle compares: layer norms over at least three features, since those over fewer turn
// rounding into values.
bool suits_oracle(const Case& c);

// The first tensor on which the two float64 runs differ, or nothing. Throws golden::EnvironmentError without Python.
std::optional<std::string> oracle_difference(const Case& c);

// Compares cases on a thread of its own, one of each kind (model, ties, optimizer, momentum, decay, clipping).
class Oracle {
 public:
  explicit Oracle(std::vector<Case> cases);
  ~Oracle();

  struct Outcome {
    int64_t compared = 0;
    std::vector<std::pair<Case, std::string>> differences;
  };
  // Waits for the end of all cases, or of the current one when `cut_short`. Rethrows an EnvironmentError.
  Outcome finish(bool cut_short);

 private:
  std::vector<Case> cases_;
  std::atomic<bool> stop_{false};
  Outcome outcome_;
  std::exception_ptr error_;
  std::thread thread_;
};

// Of these cases the first of each kind.
std::vector<Case> one_of_each_kind(const std::vector<Case>& cases);

}  // namespace harness
