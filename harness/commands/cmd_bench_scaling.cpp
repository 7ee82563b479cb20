#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "harness/commands/commands.h"
#include "harness/commands/json_lines.h"
#include "harness/plan/dry_run.h"
#include "harness/plan/plot.h"
#include "shardproof/base/check.h"

namespace harness {
namespace {

struct Arguments {
  std::string json;
  int64_t ranks_max = 16384, tensors_max = 10000;
};

// Linear layers, each a unit of its own with two small tensors: nothing but bookkeeping.
golden::Model layers_of(int64_t tensors) {
  golden::Model model;
  model.mlp.widths.assign(static_cast<size_t>(tensors / 2 + 1), 4);
  return model;
}

struct Row {
  int64_t ranks = 0, tensors = 0;
  DryRunCost cost;
};

// The faster of two runs.
Row measured(int64_t ranks, int64_t tensors) {
  DryRun run;
  run.what.model = layers_of(tensors);
  run.what.mesh = shardproof::Mesh({{"dp_shard", ranks}});
  Row row{ranks, tensors, dry_run(run).cost};
  const DryRunCost again = dry_run(run).cost;
  row.cost = {std::min(row.cost.shard, again.shard), std::min(row.cost.step, again.step),
              std::min(row.cost.placements, again.placements)};
  return row;
}

void print(const Row& row, JsonLines& out) {
  fmt::print("{:>10}{:>10}{:>14}{:>14}{:>14}\n", row.ranks, row.tensors, seconds_text(row.cost.shard),
             seconds_text(row.cost.step), seconds_text(row.cost.placements));
  std::fflush(stdout);  // each row is the progress
  out.write({{"type", "scaling"},
             {"ranks", row.ranks},
             {"tensors", row.tensors},
             {"shard_seconds", row.cost.shard},
             {"step_seconds", row.cost.step},
             {"placements_seconds", row.cost.placements}});
}

void run(const Arguments& a) {
  SHARD_REQUIRE(a.ranks_max >= 1 && a.tensors_max >= 10, "bench", "expected at least 1 rank and 10 tensors, got {} and {}",
                a.ranks_max, a.tensors_max);
  at::set_num_threads(1);
  JsonLines out(a.json);
  fmt::print("{:>10}{:>10}{:>14}{:>14}{:>14}   of one rank, zero3; nothing is computed\n", "ranks", "tensors", "shard", "step",
             "placements");
  for (int64_t ranks = 1; ranks <= a.ranks_max; ranks *= 4) print(measured(ranks, 1000), out);
  for (int64_t tensors = 10; tensors <= a.tensors_max; tensors *= 10) print(measured(16, tensors), out);
}

}  // namespace

void add_bench_scaling_command(CLI::App& bench, int& exit_code) {
  auto arguments = std::make_shared<Arguments>();
  Arguments* a = arguments.get();
  CLI::App* command =
      bench.add_subcommand("scaling", "time the bookkeeping of one rank against the number of ranks, and of tensors");
  command->add_option("--ranks-max", a->ranks_max, "worlds of 1, 4, 16, ... up to so many ranks, simulated")
      ->capture_default_str();
  command->add_option("--tensors-max", a->tensors_max, "models of 10, 100, ... up to so many tensors")->capture_default_str();
  command->add_option("--json", a->json, "also write one JSON object for each row to this file");
  command->callback([arguments, a, &exit_code] {
    run(*a);
    exit_code = 0;
  });
}

}  // namespace harness
