#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "harness/commands/choices.h"
#include "harness/commands/commands.h"
#include "harness/commands/json_lines.h"
#include "harness/plan/dry_run.h"
#include "harness/train/train_progress.h"
#include "shardproof/base/check.h"

namespace harness {
namespace {

using nlohmann::json;
using shardproof::MemoryKind;

struct Arguments {
  std::string model = "gpt(layers=12,hidden=768,heads=12,vocab=50257,positions=1024,tied=1)", mesh = "dp_shard=8";
  std::string strategy = "zero3", json;
  bool sequence_parallel = false, offload = false, pieces = false;
  DryRun run;
};

// What the rank holds in one place: between steps, and at most during one.
void report_memory(const char* place, const shardproof::MemoryBytes& use, JsonLines& out) {
  const auto report = [&](const char* kind, int64_t now, int64_t peak) {
    fmt::print("{:<16}{:>14}{:>14}\n", kind, size_text(now), size_text(peak));
    out.write({{"type", "plan_memory"}, {"place", place}, {"kind", kind}, {"now_bytes", now}, {"peak_bytes", peak}});
  };
  fmt::print("\n{:<16}{:>14}{:>14}\n", place, "between steps", "at most");
  for (int i = 0; i < shardproof::kMemoryKinds; ++i) {
    const auto kind = static_cast<MemoryKind>(i);
    report(to_string(kind), use.now(kind), use.peak(kind));
  }
  report("together", use.now_total(), use.peak_total_bytes);
}

void report_traffic(const DryRunResult& result, JsonLines& out) {
  fmt::print("\n{:<16}{:<22}{:>8}{:>8}{:>14}   of a step; whole buffers\n", "call", "group", "ranks", "calls", "bytes");
  for (const Traffic& traffic : result.traffic) {
    fmt::print("{:<16}{:<22}{:>8}{:>8}{:>14}\n", traffic.op, traffic.group,
               traffic.ranks > 0 ? std::to_string(traffic.ranks) : "", traffic.calls, size_text(traffic.bytes));
    out.write({{"type", "plan_traffic"},
               {"op", traffic.op},
               {"group", traffic.group},
               {"calls", traffic.calls},
               {"bytes", traffic.bytes}});
  }
  if (result.traffic.empty()) fmt::print("none\n");
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

void run(Arguments& a) {
  DryRun& dry = a.run;
  dry.what.model = parse_model(a.model);
  validate(dry.what.model);
  dry.what.mesh = chosen_mesh(a.mesh);
  dry.what.strategy = chosen_strategy(a.strategy).name;
  dry.what.options.sequence_parallel = a.sequence_parallel;
  dry.what.options.offload = a.offload ? offload_pageable : offload_none;
  SHARD_REQUIRE(dry.rank >= 0 && dry.rank < dry.what.mesh.size(), "plan", "mesh '{}' has ranks 0 to {}, --rank is {}", a.mesh,
                dry.what.mesh.size() - 1, dry.rank);
  JsonLines out(a.json);
  at::set_num_threads(1);
  const DryRunResult result = dry_run(dry);
  fmt::print("{}\n{} on {}, rank {} of {}: {} of {} parameters\n", str(dry.what.model), dry.what.strategy,
             dry.what.mesh.str(), dry.rank, dry.what.mesh.size(), result.own_parameters, result.parameters);
  out.write({{"type", "plan"},
             {"model", str(dry.what.model)},
             {"mesh", dry.what.mesh.str()},
             {"strategy", dry.what.strategy},
             {"rank", dry.rank},
             {"parameters", result.parameters},
             {"own_parameters", result.own_parameters}});
  report_memory("device", result.stepped, out);
  if (a.offload) report_memory("host", result.stepped.host, out);
  report_traffic(result, out);
  if (a.pieces) report_pieces(result, out);
}

}  // namespace

void add_plan_command(CLI::App& app, int& exit_code) {
  auto arguments = std::make_shared<Arguments>();
  Arguments* a = arguments.get();
  CLI::App* command = app.add_subcommand(
      "plan", "say what one rank of a mesh of any size holds, calls and moves in a step; the rank computes alone and counts");
  command->add_option("--model", a->model, "the model, written as in a case: gpt(...), mlp(...), ...")->capture_default_str();
  command->add_option("--mesh", a->mesh, "the mesh as axis=size,axis=size; it may have thousands of ranks")
      ->capture_default_str();
  command->add_option("--strategy", a->strategy, "the strategy: ddp, zero1, zero2, zero3, hsdp or hfsdp")
      ->capture_default_str();
  command->add_option("--rank", a->run.rank, "the rank whose memory and calls are counted")->capture_default_str();
  command->add_option("--rounds", a->run.rounds, "how many microbatches a step has")->capture_default_str();
  command->add_option("--samples", a->run.samples, "how many samples a microbatch has")->capture_default_str();
  command->add_option("--length", a->run.length, "the length of a sequence; 0: the longest that the model takes")
      ->capture_default_str();
  command->add_option("--dtype", a->run.dtype, "the dtype of computation and reduction: float32, bf16 or fp16")
      ->capture_default_str();
  command->add_flag("--sequence-parallel", a->sequence_parallel, "split activations along tp between layers");
  command->add_flag("--offload", a->offload, "keep main parameters, optimizer state and final gradients in the host's memory");
  command->add_flag("--pieces", a->pieces, "list which elements of each parameter the rank keeps");
  command->add_option("--json", a->json, "also write JSON objects to this file, one a line");
  command->callback([arguments, a, &exit_code] {
    run(*a);
    exit_code = 0;
  });
}

}  // namespace harness
