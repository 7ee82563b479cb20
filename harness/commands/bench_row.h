// What a contestant of the benchmark measured, over all rounds.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <vector>

namespace harness {

struct BenchRow {
  std::vector<double> step_ms, ratios, losses;  // ratios: a round's median step over that of `single` in the same round
  std::vector<double> check_percent;            // of the steps of all rounds
  double peak_mib = 0;
  double live_mib = 0, formula_mib = 0, tensor_mib = 0;  // 0 where they are not known
  double processor_ms = 0;                               // of a step of a rank; of the fastest round; 0 where it is not known
  int64_t calls = 0, bytes = 0;

  // A round: what bench::run returned, and the median step of `single`.
  void add(const nlohmann::json& result, double single_ms);
};

// The largest difference of a loss from that of `single`, as a part of its value.
double worst_difference(const BenchRow& row, const BenchRow& single);

}  // namespace harness
