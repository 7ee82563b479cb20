#include "harness/commands/plan_report.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "harness/train/train_progress.h"

namespace harness {

using nlohmann::json;
using shardproof::MemoryKind;

void report_memory(const char* place, const shardproof::MemoryBytes& use, JsonLines& out) {
  const auto report = [&](const char* kind, int64_t now, int64_t peak) {
    fmt::print("{:<16}{:>14}{:>14}\n", kind, size_text(now), size_text(peak));
    out.write({{"type", "plan_memory"}, {"place", place}, {"kind", kind}, {"now_bytes", now}, {"peak_bytes", peak}});
  };
  fmt::print("\n{:<16}{:>14}{:>14}\n", place, "between steps", "at most");
  for (int i = 0; i < shardproof::kMemoryKinds; ++i) {
    const auto kind = static_cast<MemoryKind>(i);
    if (kind == MemoryKind::activation && use.peak(kind) == 0) continue;  // none leave; `report_activations` has them
    report(to_string(kind), use.now(kind), use.peak(kind));
  }
  report("together", use.now_total(), use.peak_total_bytes);
}

void report_activations(const DryRunResult& result, JsonLines& out) {
  if (result.peak_bytes == 0) return;  // of a model that has no operators without memory
  fmt::print("{:<16}{:>14}{:>14}   after the forward of a microbatch\n", "activations", "", size_text(result.activation_bytes));
  fmt::print("{:<16}{:>14}{:>14}   with activations and what operators make\n", "all memory", "", size_text(result.peak_bytes));
  out.write({{"type", "plan_activations"}, {"bytes", result.activation_bytes}, {"all_peak_bytes", result.peak_bytes}});
}

void report_traffic(const DryRunResult& result, JsonLines& out) {
  fmt::print("\n{:<16}{:<22}{:>8}{:>8}{:>14}   of a step; whole buffers\n", "call", "group", "ranks", "calls", "bytes");
  for (const Traffic& traffic : result.traffic) {
    const bool is_routed = traffic.worst_bytes != traffic.bytes;
    fmt::print("{:<16}{:<22}{:>8}{:>8}{:>14}{}\n", traffic.op, traffic.group, traffic.ranks, traffic.calls,
               size_text(traffic.bytes), is_routed ? fmt::format("   to {}", size_text(traffic.worst_bytes)) : "");
    out.write({{"type", "plan_traffic"},
               {"op", traffic.op},
               {"group", traffic.group},
               {"ranks", traffic.ranks},
               {"calls", traffic.calls},
               {"bytes", traffic.bytes},
               {"worst_bytes", traffic.worst_bytes}});
  }
  if (result.traffic.empty()) fmt::print("none\n");
  const ExpertRows& rows = result.expert_rows;
  if (rows.worst == 0) return;
  fmt::print(
      "\nexperts of the rank get {} rows in a layer and microbatch where routing is even, as memory and time have it;\n"
      "at most {}, where every token of the ranks that share them chooses as many of them as it may, or a capacity lets it\n",
      grouped(rows.even), grouped(rows.worst));
  out.write({{"type", "plan_experts"}, {"rows", rows.even}, {"worst_rows", rows.worst}});
}

void report_pieces(const DryRunResult& result, JsonLines& out) {
  fmt::print("\n{:<40}{:>24}{:>14}{:>14}   elements of this rank, row-major\n", "parameter", "of shape", "from", "to");
  for (const auto& piece : result.pieces) {
    fmt::print("{:<40}{:>24}{:>14}{:>14}\n", piece.name, json(piece.shape).dump(), piece.run.begin, piece.run.end);
    out.write({{"type", "plan_piece"},
               {"parameter", piece.name},
               {"shape", piece.shape},
               {"begin", piece.run.begin},
               {"end", piece.run.end}});
  }
}

void report_time(const DryRun& run, const DryRunResult& result, const StepTime& time, const Machine& machine, JsonLines& out) {
  double flops = 0;
  for (const Operator& what : result.record.operators) flops += what.flops;
  const double tokens = static_cast<double>(tokens_of_step(run)) / time.seconds;
  const double most = machine.flops.contains(run.dtype) ? machine.flops.at(run.dtype) : 0;
  const bool fits = static_cast<double>(result.peak_bytes) <= machine.memory_bytes;
  fmt::print("\ntime of a step on {:<14}{:>12}\n", machine.name, seconds_text(time.seconds));
  fmt::print("  {:<28}{:>14}\n", "operators", seconds_text(time.computing));
  fmt::print("  {:<28}{:>14}   of it the rank waits for {}\n", "collectives", seconds_text(time.communicating),
             seconds_text(time.waiting));
  for (const auto& [group, seconds] : time.communicating_by_group)
    fmt::print("    {:<26}{:>14}\n", group, seconds_text(seconds));
  fmt::print("  {:<28}{:>14.4g}\n", run.what.model.of_tokens() ? "tokens/s of all ranks" : "samples/s of all ranks", tokens);
  if (most > 0) fmt::print("  {:<28}{:>13.1f}%\n", "of the rate of products", 100 * flops / time.seconds / most);
  fmt::print("  {:<28}{:>14}   of {}\n", fits ? "memory fits" : "MEMORY DOES NOT FIT", size_text(result.peak_bytes),
             size_text(static_cast<int64_t>(machine.memory_bytes)));
  out.write({{"type", "plan_time"},
             {"machine", machine.name},
             {"seconds", time.seconds},
             {"operator_seconds", time.computing},
             {"collective_seconds", time.communicating},
             {"waiting_seconds", time.waiting},
             {"collective_seconds_by_group", time.communicating_by_group},
             {"flops", flops},
             {"per_second", tokens},
             {"fits", fits}});
}

void report_search(const SearchResult& result, size_t rows, double memory_max, JsonLines& out) {
  const auto fitting = std::ranges::count(result.found, true, &Found::fits);
  fmt::print("{} of {} choices fit in {}; best first\n\n", fitting, result.found.size(),
             size_text(static_cast<int64_t>(memory_max)));
  fmt::print("{:<10}{:<44}{:>14}{:>12}{:>12}{:>14}\n", "strategy", "mesh", "memory", "step", "waiting", "tokens/s");
  for (size_t i = 0; i < result.found.size(); ++i) {
    const Found& found = result.found[i];
    if (i < rows)
      fmt::print("{:<10}{:<44}{:>14}{:>12}{:>12}{:>14.4g}{}\n", found.choice.strategy, found.choice.mesh.str(),
                 size_text(found.peak_bytes), seconds_text(found.time.seconds), seconds_text(found.time.waiting),
                 found.tokens_per_second, found.fits ? "" : "  too large");
    out.write({{"type", "plan_choice"},
               {"strategy", found.choice.strategy},
               {"mesh", found.choice.mesh.str()},
               {"peak_bytes", found.peak_bytes},
               {"seconds", found.time.seconds},
               {"waiting_seconds", found.time.waiting},
               {"per_second", found.tokens_per_second},
               {"fits", found.fits}});
  }
  if (result.found.size() > rows) fmt::print("and {} more; --json has all\n", result.found.size() - rows);
  for (const std::string& reason : result.refused) fmt::print("not possible: {}\n", reason);
}

}  // namespace harness
