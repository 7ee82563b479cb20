// What `plan` says of a contestant of the benchmark, beside what was measured.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench/contestant.h"
#include "harness/commands/bench_row.h"
#include "harness/commands/json_lines.h"
#include "harness/plan/machine.h"

namespace harness {

struct Prediction {
  double step_ms = 0;
  double processor_ms = 0;       // of a rank, where its own thread carries what is sent; else 0
  double tensor_mib = 0;         // of a rank's tensors at most
  int64_t calls = 0, bytes = 0;  // of a step, without barriers
};

// Rank 0 of ours takes the contestant's own step on the device without memory (plan/dry_step.h).
Prediction predict(bench::Task task, const Machine& machine);

struct Predicted {
  std::string label;  // of the contestant
  Prediction prediction;
  const BenchRow& measured;
};

// Prints a line for each, and writes it as JSON. Times are compared with the fastest round, since other programs only make a
// round slower. Returns whether calls and bytes are equal to those measured; how near times and memory must be is not judged.
bool report_predictions(const std::vector<Predicted>& all, const Machine& machine, JsonLines& out);

}  // namespace harness
