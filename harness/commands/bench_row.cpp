#include "harness/commands/bench_row.h"

#include <algorithm>
#include <cmath>

#include "harness/commands/bench_process.h"

namespace harness {

void BenchRow::add(const nlohmann::json& result, double single_ms) {
  step_ms.push_back(median(result["step_ms"].get<std::vector<double>>()));
  ratios.push_back(step_ms.back() / single_ms);
  losses = result["losses"].get<std::vector<double>>();
  if (result.contains("check_percent"))
    for (const nlohmann::json& percent : result["check_percent"]) check_percent.push_back(percent);
  peak_mib = std::max(peak_mib, result["peak_mib"].get<double>());
  live_mib = result.value("live_mib", 0.0);
  formula_mib = result.value("formula_mib", 0.0);
  tensor_mib = result.value("tensor_mib", 0.0);
  if (result.contains("processor_ms")) {
    const double ms = median(result["processor_ms"].get<std::vector<double>>());
    processor_ms = processor_ms == 0 ? ms : std::min(processor_ms, ms);
  }
  calls = result["calls"];
  bytes = result["bytes"];
}

double worst_difference(const BenchRow& row, const BenchRow& single) {
  double worst = 0;
  for (size_t i = 0; i < row.losses.size(); ++i)
    worst = std::max(worst, std::abs(row.losses[i] - single.losses.at(i)) / std::abs(single.losses.at(i)));
  return worst;
}

}  // namespace harness
