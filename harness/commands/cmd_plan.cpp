#include <ATen/Parallel.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "harness/case/network.h"
#include "harness/case/model_fields.h"
#include "harness/commands/choices.h"
#include "harness/commands/commands.h"
#include "harness/commands/json_lines.h"
#include "harness/commands/plan_report.h"
#include "harness/commands/progress.h"
#include "harness/commands/usage.h"
#include "harness/plan/calibrate.h"
#include "harness/train/train_progress.h"
#include "shardproof/base/check.h"

namespace harness {
namespace {

constexpr size_t kRowsOfSearch = 20;
constexpr double kShownAfter = 2;  // seconds

struct Arguments {
  std::string model = "gpt(layers=12,hidden=768,heads=12,vocab=50257,positions=1024,tied=1)", mesh = "dp_shard=8";
  std::string strategy = "zero3", machine, json, calibrate;
  bool sequence_parallel = false, cut_experts = false, lists = false, pieces = false, searches = false;
  int64_t ranks = 8, overlap_pieces = 1, expert_ranks = 1, context_attention = 0;
  uint64_t memory_max = 0;
  DryRun run;
};

// A model as in a case, a config.json, or a folder with one.
golden::Model chosen_model(const std::string& text) {
  namespace fs = std::filesystem;
  std::error_code is_no_path;  // as the text of a long model
  const bool is_config = fs::is_directory(text, is_no_path) || text.ends_with(".json");
  return is_config ? described_model(shardproof::checkpoint::read_hugging_face_config(text)) : parse_model(text);
}

void find_meshes(const Arguments& a, const Machine& machine, JsonLines& out) {
  const SearchLimits limits{a.ranks, a.memory_max > 0 ? static_cast<double>(a.memory_max) : machine.memory_bytes};
  Progress progress;
  const SearchResult result = search(a.run, limits, machine, [&](size_t done, size_t all, const Choice& choice) {
    if (progress.seconds() > kShownAfter)
      progress.show(static_cast<double>(done) / static_cast<double>(all),
                    fmt::format("{} of {}: {} on {}", done, all, choice.strategy, choice.mesh.str()));
  });
  progress.clear();
  fmt::print("{}\non {} ranks of {}: {}\n", str(a.run.what.model), a.ranks, machine.name, machine.source);
  report_search(result, kRowsOfSearch, limits.memory_max, out);
}

void plan_one(Arguments& a, const std::optional<Machine>& machine, JsonLines& out) {
  DryRun& dry = a.run;
  SHARD_REQUIRE(dry.rank >= 0 && dry.rank < dry.what.mesh.size(), "plan", "mesh '{}' has ranks 0 to {}, --rank is {}", a.mesh,
                dry.what.mesh.size() - 1, dry.rank);
  Progress progress;
  dry.shown = [&](double fraction, const std::string& what) {
    if (progress.seconds() > kShownAfter) progress.show(fraction, what);
  };
  const DryRunResult result = dry_run(dry);
  progress.clear();
  fmt::print("{}\n{} on {}, rank {} of {}: {} of {} parameters\n", str(dry.what.model), dry.what.strategy, dry.what.mesh.str(),
             dry.rank, dry.what.mesh.size(), grouped(result.own_parameters), grouped(result.parameters));
  out.write({{"type", "plan"},
             {"model", str(dry.what.model)},
             {"mesh", dry.what.mesh.str()},
             {"strategy", dry.what.strategy},
             {"rank", dry.rank},
             {"parameters", result.parameters},
             {"own_parameters", result.own_parameters},
             {"tensors", result.placements.size()},
             {"shard_seconds", result.cost.shard},
             {"step_seconds", result.cost.step},
             {"placements_seconds", result.cost.placements}});
  report_memory("device", result.stepped, out);
  report_activations(result, out);
  if (offloads(dry) || dry.offload_activations) report_memory("host", result.stepped.host, out);
  report_traffic(result, out);
  if (machine) report_time(dry, result, walk(result.record, *machine), *machine, out);
  if (a.pieces) report_pieces(result, out);
}

void run(Arguments& a) {
  at::set_num_threads(1);
  if (a.lists) {
    fmt::print("{}", table_of_sharding_options());
    return;
  }
  if (!a.calibrate.empty()) {
    write_machine(calibrate([](const std::string& what) { fmt::print(stderr, "measuring {}\n", what); }), a.calibrate);
    fmt::print("wrote {}; `plan --machine {}` reads it\n", a.calibrate, a.calibrate);
    return;
  }
  std::optional<Machine> machine;
  if (a.searches && a.machine.empty()) a.machine = "h100";
  if (!a.machine.empty()) machine = chosen_machine(a.machine);
  DryRun& dry = a.run;
  dry.what.model = chosen_model(a.model);
  validate(dry.what.model);
  require_rounds(dry.what.model, dry.rounds, "plan", "leave out --rounds");
  dry.what.mesh = chosen_mesh(a.mesh);
  dry.what.strategy = chosen_strategy(a.strategy).name;
  dry.what.options.sequence_parallel = a.sequence_parallel;
  dry.what.options.overlap_pieces = a.overlap_pieces;
  dry.what.options.ep = a.expert_ranks;
  dry.what.options.etp = a.cut_experts;
  dry.what.options.context_attention = a.context_attention;
  const bool is_conv = dry.what.model.kind == golden::Model::Kind::conv;
  SHARD_REQUIRE(!machine || runs_without_memory(dry), "plan",
                "--machine and --search need the operators and the memory of a step, which are not known for {}; leave these "
                "options out, or {}",
                is_conv ? "a conv" : "offload", is_conv ? "take another model" : "leave offload out");
  JsonLines out(a.json);
  if (a.searches)
    find_meshes(a, *machine, out);
  else
    plan_one(a, machine, out);
}

void add_options_of_time(CLI::App* command, Arguments* a) {
  command->add_option("--machine", a->machine,
                      "also predict the time of a step on this machine: a100, h100, h200, or a file that --calibrate wrote");
  command->add_option("--calibrate", a->calibrate, "measure this machine, with threads as ranks, and write it to this file");
  command->add_flag("--search", a->searches,
                    "try the meshes and strategies for --ranks ranks, and list those that fit, best first");
  command->add_option("--ranks", a->ranks, "how many ranks --search deals out")->capture_default_str();
  command->add_option("--memory-max", a->memory_max, "the memory of a rank for --search, e.g. 40GiB; else the machine's")
      ->transform(CLI::AsSizeValue(false));
}

}  // namespace

void add_plan_command(CLI::App& app, int& exit_code) {
  auto arguments = std::make_shared<Arguments>();
  Arguments* a = arguments.get();
  CLI::App* command = app.add_subcommand(
      "plan", "say what one rank of a mesh of any size holds, calls and moves in a step, and how long that takes");
  command->add_option("--model", a->model, "the model, written as in a case: gpt(...), mlp(...), ...; or a config.json")
      ->capture_default_str();
  command->add_option("--mesh", a->mesh, "the mesh as axis=size,axis=size; it may have thousands of ranks")
      ->capture_default_str();
  command->add_option("--strategy", a->strategy, strategy_help())->capture_default_str();
  command->add_option("--rank", a->run.rank, "the rank whose memory and calls are counted")->capture_default_str();
  command->add_option("--rounds", a->run.rounds, "how many microbatches a step has")->capture_default_str();
  command->add_option("--samples", a->run.samples, "how many samples a microbatch has")->capture_default_str();
  command->add_option("--length", a->run.length, "the length of a sequence; 0: the longest that the model takes")
      ->capture_default_str();
  command->add_option("--dtype", a->run.dtype, "the dtype of computation and reduction: float32, bf16 or fp16")
      ->capture_default_str();
  add_sharding_options(*command, a->run.sharding);
  command->add_flag("--options", a->lists, "print what --set takes, and plan nothing");
  command->add_flag("--sequence-parallel", a->sequence_parallel, "split activations along tp between layers");
  command
      ->add_option("--overlap-pieces", a->overlap_pieces,
                   "cut products of layers that tp cuts into so many pieces of the microbatch")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  add_context_attention(*command, a->context_attention);
  command
      ->add_option("--expert-ranks", a->expert_ranks, "so many neighbours along dp_shard share the experts of a llama's layers")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_flag("--cut-experts", a->cut_experts, "cut the experts of a llama's layers inside, along tp");
  command->add_flag("--recompute", a->run.recompute,
                    "keep no activations inside blocks, and compute them again in the backward");
  command->add_flag("--offload-activations", a->run.offload_activations,
                    "keep activations of units in the host's memory between their forward and their backward");
  command->add_flag("--pieces", a->pieces, "list which elements of each parameter the rank keeps");
  add_options_of_time(command, a);
  command->add_option("--json", a->json, "also write JSON objects to this file, one a line");
  add_verbosity(*command, "show no progress");
  command->callback([arguments, a, &exit_code] {
    run(*a);
    exit_code = 0;
  });
}

}  // namespace harness
