#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>

#include "harness/case/axes.h"
#include "harness/commands/bench_plot.h"
#include "harness/commands/commands.h"
#include "harness/commands/json_lines.h"
#include "harness/plan/dry_run.h"
#include "harness/plan/metadata_cost.h"
#include "harness/plan/stopwatch.h"
#include "harness/plan/timeline.h"
#include "shardproof/algebra/plan.h"
#include "shardproof/base/check.h"

namespace harness {
namespace {

struct Arguments {
  std::string json, plot;
  int64_t ranks_max = 16384, tensors_max = 100000, repeats = 2;
};

// Linear layers, each a unit of its own with two small tensors: nothing but bookkeeping.
golden::Model layers_of(int64_t tensors) {
  golden::Model model;
  model.mlp.widths.assign(static_cast<size_t>(tensors / 2 + 1), 4);
  return model;
}

// A rank finds out which collectives bring each unit's parameters and sum its gradients. It is a part of sharding.
double seconds_of_collectives(const DryRun& run, int64_t units) {
  const shardproof::Strategy strategy = on_mesh(shardproof::strategy(run.what.strategy), run.what.mesh);
  const shardproof::Mesh& mesh = run.what.mesh;
  const shardproof::Shape bucket = {mesh.size() * 16};
  Stopwatch watch;
  for (int64_t unit = 0; unit < units; ++unit) {
    lower(bucket, mesh, strategy.parameter, strategy.compute);
    lower(bucket, mesh, strategy.produced, strategy.state);
  }
  return watch.lap();
}

struct Row {
  int64_t ranks = 0, tensors = 0;
  DryRunCost cost;
  MetadataCost metadata;
  double collectives = 0;
};

void keep_least(double& seconds, double other) {
  seconds = std::min(seconds, other);
}

// The fastest of the runs.
Row measured(int64_t ranks, int64_t tensors, int64_t repeats) {
  DryRun run;
  run.what.model = layers_of(tensors);
  run.what.mesh = shardproof::Mesh({{axes::dp_shard, ranks}});
  run.saves = true;
  Row row{ranks, tensors, {}, {}};
  for (int64_t repeat = 0; repeat < repeats; ++repeat) {
    const DryRunResult result = dry_run(run);
    const MetadataCost metadata = metadata_cost(result.placements);
    const double collectives = seconds_of_collectives(run, tensors / 2);
    if (repeat == 0) row.cost = result.cost, row.metadata = metadata, row.collectives = collectives;
    keep_least(row.collectives, collectives);
    keep_least(row.cost.shard, result.cost.shard);
    keep_least(row.cost.step, result.cost.step);
    keep_least(row.cost.placements, result.cost.placements);
    keep_least(row.cost.save_plan, result.cost.save_plan);
    keep_least(row.cost.next_save_plan, result.cost.next_save_plan);
    keep_least(row.metadata.write, metadata.write);
    keep_least(row.metadata.read, metadata.read);
  }
  return row;
}

struct Column {
  const char* name;
  const char* key;  // in the JSON
  double (*seconds)(const Row& row);
};
const std::vector<Column> kColumns = {
    {"shard", "shard_seconds", [](const Row& row) { return row.cost.shard; }},
    {"collectives", "collectives_seconds", [](const Row& row) { return row.collectives; }},
    {"step", "step_seconds", [](const Row& row) { return row.cost.step; }},
    {"placements", "placements_seconds", [](const Row& row) { return row.cost.placements; }},
    {"save plan", "save_plan_seconds", [](const Row& row) { return row.cost.save_plan; }},
    {"next save", "next_save_plan_seconds", [](const Row& row) { return row.cost.next_save_plan; }},
    {"metadata", "metadata_seconds", [](const Row& row) { return row.metadata.write + row.metadata.read; }},
};

void print(const Row& row, JsonLines& out) {
  fmt::print("{:>8}{:>9}{:>9}", row.ranks, row.tensors, row.metadata.boxes);
  nlohmann::json line = {{"type", "scaling"},
                         {"ranks", row.ranks},
                         {"tensors", row.tensors},
                         {"boxes", row.metadata.boxes},
                         {"metadata_bytes", row.metadata.bytes}};
  for (const Column& column : kColumns) {
    fmt::print("{:>12}", seconds_text(column.seconds(row)));
    line[column.key] = column.seconds(row);
  }
  fmt::print("\n");
  std::fflush(stdout);  // each row is the progress
  out.write(line);
}

PlottedPanel panel_of(const char* title, const std::vector<Row>& rows, int64_t Row::*against) {
  PlottedPanel panel{title, {}};
  for (const Column& column : kColumns) {
    PlottedCurve& curve = panel.curves.emplace_back(PlottedCurve{column.name, {}});
    for (const Row& row : rows) curve.points.emplace_back(static_cast<double>(row.*against), column.seconds(row));
  }
  return panel;
}

void run(const Arguments& a) {
  SHARD_REQUIRE(a.ranks_max >= 1 && a.tensors_max >= 10 && a.repeats >= 1, "bench",
                "expected at least 1 rank, 10 tensors and 1 repeat, got {}, {} and {}", a.ranks_max, a.tensors_max, a.repeats);
  at::set_num_threads(1);
  JsonLines out(a.json);
  fmt::print("{:>8}{:>9}{:>9}", "ranks", "tensors", "boxes");
  for (const Column& column : kColumns) fmt::print("{:>12}", column.name);
  fmt::print("   of one rank, zero3; nothing is computed\n");
  std::vector<Row> by_ranks, by_tensors;
  for (int64_t ranks = 1; ranks <= a.ranks_max; ranks *= 4) print(by_ranks.emplace_back(measured(ranks, 1000, a.repeats)), out);
  for (int64_t tensors = 10; tensors <= a.tensors_max; tensors *= 10)
    print(by_tensors.emplace_back(measured(16, tensors, a.repeats)), out);
  if (a.plot.empty()) return;
  std::ofstream picture(a.plot);
  picture << curves_of({panel_of("against ranks, 1,000 tensors", by_ranks, &Row::ranks),
                        panel_of("against tensors, 16 ranks", by_tensors, &Row::tensors)},
                       "bookkeeping of one rank, zero3; the dotted line is proportion");
  picture.close();
  SHARD_REQUIRE(picture.good(), "bench", "cannot write the picture {}", a.plot);
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
  command->add_option("--repeats", a->repeats, "how often each row is measured; the fastest counts")->capture_default_str();
  command->add_option("--json", a->json, "also write one JSON object for each row to this file");
  command->add_option("--plot", a->plot, "also draw the curves into this SVG file");
  command->callback([arguments, a, &exit_code] {
    run(*a);
    exit_code = 0;
  });
}

}  // namespace harness
