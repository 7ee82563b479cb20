#include "harness/commands/bench_prediction.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>

#include "harness/plan/dry_step.h"
#include "harness/plan/timeline.h"

namespace harness {

Prediction predict(bench::Task task, const Machine& machine) {
  task.device = c10::kMeta;
  const DryRunResult result = dry_step({.mesh = task.mesh}, [&](const std::shared_ptr<shardproof::MeshComm>& comms) {
    auto training = std::make_shared<bench::Training>(task, comms);
    const at::Tensor tokens = bench::own_tokens(task, /*step=*/0, /*rank=*/0);
    return DryTraining{training, training->sharded, training->optimizer, [training, tokens] { return training->loss(tokens); }};
  });
  Prediction predicted{.step_ms = 1e3 * walk(result.record, machine).seconds,
                       .tensor_mib = static_cast<double>(result.peak_bytes) / 1048576};
  Machine alone = machine;
  alone.ranks_at_once = 0;  // a rank that waits for a core takes no processor time
  if (!machine.overlaps) predicted.processor_ms = 1e3 * walk(result.record, alone).seconds;
  for (const Traffic& traffic : result.traffic) {
    if (traffic.op == to_string(shardproof::Op::barrier)) continue;
    predicted.calls += traffic.calls;
    predicted.bytes += traffic.bytes;
  }
  return predicted;
}

bool report_predictions(const std::vector<Predicted>& all, const Machine& machine, JsonLines& out) {
  fmt::print("\nas plan predicts for '{}', and as measured\n{:<14} {:>26} {:>26} {:>26} {:>6} {:>12}\n", machine.name, "",
             "step ms", "processor ms", "MiB of tensors", "calls", "bytes");
  bool held = true;
  for (const auto& [label, plan, row] : all) {
    const double step_ms = *std::ranges::min_element(row.step_ms);
    const auto beside = [](double predicted, double measured) {
      if (predicted == 0 || measured == 0) return std::string();
      return fmt::format("{:.1f} {:.1f} {:+.1f}%", predicted, measured, 100 * (predicted / measured - 1));
    };
    const bool equal = plan.calls == row.calls && plan.bytes == row.bytes;
    held &= equal;
    fmt::print("{:<14} {:>26} {:>26} {:>26} {:>6} {:>12}{}\n", label, beside(plan.step_ms, step_ms),
               beside(plan.processor_ms, row.processor_ms), beside(plan.tensor_mib, row.tensor_mib), plan.calls, plan.bytes,
               equal ? "" : fmt::format("  NOT EQUAL: measured {} calls, {} bytes", row.calls, row.bytes));
    out.write({{"type", "bench_prediction"},
               {"contestant", label},
               {"machine", machine.name},
               {"step_ms", plan.step_ms},
               {"step_ms_measured", step_ms},
               {"processor_ms", plan.processor_ms},
               {"processor_ms_measured", row.processor_ms},
               {"tensor_mib", plan.tensor_mib},
               {"tensor_mib_measured", row.tensor_mib},
               {"calls", plan.calls},
               {"calls_measured", row.calls},
               {"bytes", plan.bytes},
               {"bytes_measured", row.bytes}});
  }
  return held;
}

}  // namespace harness
