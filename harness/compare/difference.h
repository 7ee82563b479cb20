// A value in which a step of the sharded run is not what it should be.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace harness {

struct Difference {
  std::string value;         // which: "loss", "evaluation", "gradient norm", "gradient", "exp_avg", "parameter", "buffer", ...
  std::string tensor = {};   // its name; empty: the value is a number
  std::string element = {};  // "[3, 5]"; empty: of all
  int64_t rank = -1;         // that holds it; -1: no single one
  int64_t round = -1;        // -1: of the step
  std::string says;          // what it is and should be

  // "gradient of fc.weight, element [3, 5], on rank 2: golden 1, sharded 2"
  std::string str() const;
};

// The first that was found, if any.
using FoundDifference = std::optional<Difference>;

Difference number_on(size_t rank, std::string value, std::string says);
Difference element_on(size_t rank, std::string value, std::string tensor, std::string element, std::string says);

}  // namespace harness
