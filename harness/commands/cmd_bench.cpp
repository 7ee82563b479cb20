#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "bench/contestant.h"
#include "harness/case/axes.h"
#include "harness/commands/allocator.h"
#include "harness/commands/bench_plot.h"
#include "harness/commands/bench_prediction.h"
#include "harness/commands/bench_process.h"
#include "harness/commands/bench_row.h"
#include "harness/commands/choices.h"
#include "harness/commands/commands.h"
#include "harness/commands/json_lines.h"
#include "harness/commands/launch_options.h"
#include "harness/commands/process.h"
#include "harness/run/beside_program.h"
#include "harness/run/trace_file.h"
#include "shardproof/algebra/mesh.h"
#include "shardproof/algebra/strategy.h"
#include "shardproof/base/check.h"
#include "shardproof/device/kernels/cuda.h"
#include "shardproof/sharding/named_options.h"

namespace harness {
namespace {

using nlohmann::json;

// Sums in another order round differently, and training carries that on: losses may be so far apart, relatively. A wrong factor
// on the gradients is visible after two steps of this model, at 1e-3 and more.
constexpr double kLossTolerance = 0x1p-14;
// Autocast rounds at other places than a unit's own precision does.
constexpr double kLossToleranceBf16 = 0x1p-9;
constexpr int64_t kStepsOfTrace = 3;

struct Arguments {
  std::string against = "single", model = "gpt33m", precision = "fp32", mesh, worker, data, machine, json, plot, trace, spans;
  int64_t ranks = 2;
  bench::Task task;
  bool profiles = false;  // the rounds are over, and one step gets a profile
  int64_t rounds = 3;
  Launched launched;
  bool over_processes() const { return launched.options.backend != "threads"; }
  bool on_gpu() const { return launched.options.device == "cuda"; }
  double loss_tolerance() const { return task.bf16 ? kLossToleranceBf16 : kLossTolerance; }
};

// bench/peers/peer.py says what they are. All are PyTorch's but the last one, which is ours, run as FSDP2 is run.
constexpr std::array kPeers = {"ddp", "ddp_zero1", "fsdp2", "fsdp2_zero2", "dtensor", "python_gloo"};

bool is_peer(const std::string& contestant) {
  return std::find(kPeers.begin(), kPeers.end(), contestant) != kPeers.end();
}

// What the last line says of a mesh.
std::string with_of(const bench::Task& task) {
  return fmt::format("{}{}{}{}{}", task.sequence_parallel ? " with sequence parallelism" : "",
                     task.overlap_pieces > 1 ? fmt::format(", products in {} pieces", task.overlap_pieces) : "",
                     task.expert_ranks > 1 ? fmt::format(", experts shared by {} ranks", task.expert_ranks) : "",
                     task.sharding.empty() ? "" : ", ", fmt::join(task.sharding, ", "));
}

json spec_of(const Arguments& a, const std::string& contestant) {
  json spec = model_spec(a.task.size);
  json axes = json::array();
  for (const shardproof::Axis& axis : a.task.mesh.axes()) axes.push_back({axis.name, axis.size});
  spec.update({{"strategy", contestant},
               {"ours", a.task.strategy},
               {"ranks", a.task.mesh.size()},
               {"axes", axes},
               {"sequence_parallel", a.task.sequence_parallel},
               {"expert_ranks", a.task.expert_ranks},
               {"lr", a.task.lr},
               {"steps", a.task.steps},
               {"warmup", a.task.warmup},
               {"data", a.data},
               {"device", a.launched.options.device},
               {"bf16", a.task.bf16}});
  return spec;
}

// The command that runs one contestant in a process of its own and prints one JSON object.
std::string command_of(const Arguments& a, const std::string& contestant) {
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe");
  if (is_peer(contestant))
    return fmt::format("PYTHONPATH='{}/python'\"${{PYTHONPATH:+:$PYTHONPATH}}\" '{}/bin/python' '{}/bench/peers/peer.py' '{}'",
                       program.parent_path().string(), beside_program(SHARDPROOF_VENV).string(),
                       beside_program(SHARDPROOF_SOURCE).string(), spec_of(a, contestant).dump());
  const bool processes = a.over_processes() && contestant != "single";
  const std::string backend = a.launched.options.backend;
  std::string start;  // with nccl the worker starts its own
  if (processes && backend == "mpi")
    start = fmt::format("{} ", fmt::join(shardproof::mpirun_command(a.task.mesh.size(), {}, ::geteuid() == 0), " "));
  std::string set;
  for (const std::string& text : a.task.sharding) set += " --set " + shell_word(text);
  const std::string options = processes ? " --backend " + backend + a.launched.given() : "";
  return fmt::format(
      "{}'{}' bench{} --device {} --worker {} --strategy {} --mesh {}{} --overlap-pieces {} --expert-ranks {} --model {} "
      "--precision {} --steps {} --warmup {}{}{}{}{}",
      start, program.string(), options, a.launched.options.device, contestant, a.task.strategy, a.task.mesh.str(),
      a.task.sequence_parallel ? " --sequence-parallel" : "", a.task.overlap_pieces, a.task.expert_ranks, a.model, a.precision,
      a.task.steps, a.task.warmup, set, a.machine.empty() ? "" : " --count-tensors",
      a.spans.empty() ? "" : fmt::format(" --spans '{}'", a.spans),
      a.profiles && contestant == "ours" ? fmt::format(" --profile '{}'", a.task.profile) : "");
}

// Ours has the name of its strategy, which may be that of one of PyTorch's contestants.
std::string label_of(const Arguments& a, const std::string& contestant) {
  if (contestant == "ours") return a.task.strategy;
  return contestant == a.task.strategy ? contestant + "_pytorch" : contestant;
}

void report_check(const BenchRow& row) {
  const auto [low, high] = std::minmax_element(row.check_percent.begin(), row.check_percent.end());
  fmt::print(
      "the checks of --check=fingerprint take {:.2f}% of the processor time of the rest of a step ({:.2f}-{:.2f}, on rank 0)\n",
      median(row.check_percent), *low, *high);
}

bool report(const Arguments& a, const std::vector<std::string>& order, const std::map<std::string, BenchRow>& rows,
            JsonLines& out) {
  fmt::print("{:<14} {:>10} {:>21} {:>9} {:>9} {:>9} {:>6} {:>10} {:>10}\n", "", "step ms", "x single (range)", "peak MiB",
             "formula", "live MiB", "calls", "MiB moved", "loss diff");
  bool held = true;
  for (const std::string& name : order) {
    const BenchRow& row = rows.at(name);
    const auto [low, high] = std::minmax_element(row.ratios.begin(), row.ratios.end());
    const double difference = worst_difference(row, rows.at("single"));
    const bool agrees = difference <= a.loss_tolerance();
    held &= agrees;
    const std::string label = label_of(a, name);
    const auto known = [](double mib) { return mib == 0 ? std::string() : fmt::format("{:.1f}", mib); };
    fmt::print("{:<14} {:>10.1f} {:>7.3f} ({:.3f}-{:.3f}) {:>9.0f} {:>9} {:>9} {:>6} {:>10.1f} {:>10.1e}{}\n", label,
               median(row.step_ms), median(row.ratios), *low, *high, row.peak_mib, known(row.formula_mib), known(row.live_mib),
               row.calls, static_cast<double>(row.bytes) / 1048576, difference, agrees ? "" : "  TOO FAR");
    out.write({{"type", "bench"},
               {"contestant", label},
               {"model", a.model},
               {"device", a.launched.options.device},
               {"precision", a.precision},
               {"backend", a.launched.options.backend},
               {"backend_options", a.launched.given()},
               {"ranks", name == "single" ? 1 : a.task.mesh.size()},
               {"mesh", name == "single" ? "" : a.task.mesh.str()},
               {"sequence_parallel", a.task.sequence_parallel},
               {"overlap_pieces", a.task.overlap_pieces},
               {"expert_ranks", a.task.expert_ranks},
               {"set", a.task.sharding},
               {"allocator", allocator_name()},
               {"step_ms_median", median(row.step_ms)},
               {"ratio_median", median(row.ratios)},
               {"ratio_min", *low},
               {"ratio_max", *high},
               {"peak_mib", row.peak_mib},
               {"live_mib", row.live_mib},
               {"tensor_mib", row.tensor_mib},
               {"formula_mib", row.formula_mib},
               {"calls", row.calls},
               {"bytes", row.bytes},
               {"loss_difference_max", difference},
               {"check_percent", row.check_percent},
               {"losses", row.losses}});
  }
  if (const auto checked = rows.find("fingerprint"); checked != rows.end() && !a.on_gpu()) report_check(checked->second);
  fmt::print(
      "{}{}: {} rounds of {} steps after {} of warm-up, {} on {}; host memory: {}; peak: of a rank, {}; loss diff: relative, "
      "at most {:.1e}\n",
      a.task.mesh.str(), with_of(a.task), a.rounds, a.task.steps, a.task.warmup, a.precision, a.launched.options.device,
      allocator_name(),
      a.on_gpu() ? "that LibTorch allocated on the GPU, without NCCL's own" : "above the process before the model",
      a.loss_tolerance());
  return held;
}

// A GPU's allocator keeps its blocks, and no memory there is side by side. Parameters that are whole on every rank are not
// gathered, so there is nothing to lay side by side, and those that are cut by rows cannot lie so.
std::vector<std::string> contestants(const Arguments& a) {
  std::vector<std::string> order = {"single", "ours"};
  shardproof::ShardOptions sharding;
  shardproof::set_options(sharding, a.task.sharding);
  const bool by_rows = sharding.granularity == shardproof::Granularity::row;
  if (!a.on_gpu() && !by_rows && !chosen_strategy(a.task.strategy).parameter.flat.empty()) order.push_back("side_by_side");
  size_t begin = 0;
  while (begin <= a.against.size()) {
    const size_t end = std::min(a.against.find(',', begin), a.against.size());
    const std::string name = a.against.substr(begin, end - begin);
    SHARD_REQUIRE(name == "single" || name == "fingerprint" || is_peer(name), "bench",
                  "--against takes single, {} and fingerprint, got '{}'", fmt::join(kPeers, ", "), name);
    if (std::find(order.begin(), order.end(), name) == order.end()) order.push_back(name);
    begin = end + 1;
  }
  return order;
}

// --ranks N is short for the mesh dp_shard=N, and dp_replicate=1,dp_shard=N for strategies that need both axes.
shardproof::Mesh mesh_of(const Arguments& a) {
  if (!a.mesh.empty()) return chosen_mesh(a.mesh);
  SHARD_REQUIRE(a.ranks >= 1, "bench", "--ranks must be at least 1, got {}", a.ranks);
  const std::vector<std::string>& axes = chosen_strategy(a.task.strategy).axes;
  std::vector<shardproof::Axis> own = {{axes::dp_shard, a.ranks}};
  if (std::find(axes.begin(), axes.end(), axes::dp_replicate) != axes.end()) own.insert(own.begin(), {axes::dp_replicate, 1});
  return shardproof::Mesh(own);
}

// How many rows go where is known only when tokens are there, so nothing predicts such a step.
void require_experts(const Arguments& a, const std::vector<std::string>& order) {
  const int64_t experts = a.task.size.experts, ranks = a.task.expert_ranks;
  SHARD_REQUIRE(ranks == 1 || experts > 0, "bench", "--expert-ranks {} with {}, which has no experts; take --model moe38m",
                ranks, a.model);
  if (experts == 0) return;
  SHARD_REQUIRE(!a.task.mesh.has(axes::tp) && a.machine.empty() && !a.task.bf16 && !a.on_gpu(), "bench",
                "{} trains in float32 on the CPU, and nothing cuts it along tp or predicts it, got --mesh {}, --precision {} "
                "and --device {}{}",
                a.model, a.task.mesh.str(), a.precision, a.launched.options.device,
                a.machine.empty() ? "" : " and --machine " + a.machine);
  SHARD_REQUIRE(a.task.mesh.size() % ranks == 0 && experts % ranks == 0, "bench",
                "--expert-ranks must divide the {} ranks of --mesh {} and the {} experts of {}, got {}", a.task.mesh.size(),
                a.task.mesh.str(), experts, a.model, ranks);
  if (ranks > 1) shardproof::expert_mesh(shardproof::data_parallel_mesh(a.task.mesh), ranks);  // throws where it cannot be
  for (const std::string& name : order)
    SHARD_REQUIRE(ranks == 1 || !is_peer(name) || (name == "fsdp2" && !a.task.mesh.has(axes::dp_replicate)), "bench",
                  "of PyTorch's contestants only fsdp2 shares experts, on a mesh of dp_shard alone; leave {} out of --against",
                  name);
}

void require_mesh(const Arguments& a, const std::vector<std::string>& order) {
  const shardproof::Mesh& mesh = a.task.mesh;
  const bench::Size& size = a.task.size;
  const int64_t tp = mesh.has(axes::tp) ? mesh.size(axes::tp) : 1;
  SHARD_REQUIRE(!mesh.has(axes::cp), "bench", "the benchmark's model has whole sequences; leave cp out of --mesh {}",
                mesh.str());
  on_mesh(chosen_strategy(a.task.strategy), data_parallel_mesh(mesh));
  SHARD_REQUIRE(size.batch % a.task.data_ranks() == 0, "bench",
                "the ranks along dp_replicate and dp_shard must divide the batch of {}; --mesh {} has {} of them", size.batch,
                mesh.str(), a.task.data_ranks());
  SHARD_REQUIRE(size.heads % tp == 0 && size.vocab % tp == 0, "bench",
                "tp must divide the {} heads and the {} words of {}, got --mesh {}", size.heads, size.vocab, size.name,
                mesh.str());
  SHARD_REQUIRE(a.task.overlap_pieces == 1 || tp > 1, "bench", "--overlap-pieces needs an axis tp, got --mesh {}", mesh.str());
  SHARD_REQUIRE(!a.task.sequence_parallel || (tp > 1 && size.seq % tp == 0), "bench",
                "--sequence-parallel needs an axis tp that divides the {} tokens of a sequence, got --mesh {}", size.seq,
                mesh.str());
  require_experts(a, order);
  for (const std::string& name : order) {
    if (!is_peer(name)) continue;
    SHARD_REQUIRE(name != "python_gloo" || (!a.on_gpu() && !a.task.bf16), "bench",
                  "python_gloo trains in float32 on the CPU, got --device {} and --precision {}; leave it out of --against",
                  a.launched.options.device, a.precision);
    SHARD_REQUIRE(name == "dtensor" || !mesh.has(axes::tp), "bench",
                  "{} cuts nothing along tp, so it cannot train on {}; take --against dtensor, which cuts with "
                  "parallelize_module",
                  name, mesh.str());
    SHARD_REQUIRE(name.starts_with("ddp") || mesh.has(axes::dp_shard) || !mesh.has(axes::dp_replicate), "bench",
                  "{} replicates only over shards; give --mesh {} an axis dp_shard, of size 1 if need be", name, mesh.str());
  }
}

// The contestants start their own processes.
void require_alone(const Arguments& a) {
  shardproof::LaunchOptions options = a.launched.options;
  const shardproof::Launch launch = shardproof::read_launch(shardproof::process_environment());
  SHARD_REQUIRE(launch.world == 1, "bench",
                "{} started {} processes; bench starts those it needs: bench --backend mpi --ranks {}",
                to_string(launch.launcher), launch.world, launch.world);
  if (options.backend == "mpi") {
    SHARD_REQUIRE(shardproof::mpi_available(), "bench", "this build has no MPI; use --backend threads");
  } else {
    options.gpus = shardproof::nccl_devices();
    if (options.backend == "nccl") options.ranks = a.task.mesh.size();
    shardproof::launch(options, {});
  }
  if (a.on_gpu()) shardproof::use_cuda();
}

std::ofstream opened(const std::string& path, const char* what) {
  std::ofstream file(path);
  SHARD_REQUIRE(file.good(), "bench", "cannot write the {} to {}", what, path);
  return file;
}

void plot(const Arguments& a, const std::vector<std::string>& order, const std::map<std::string, BenchRow>& rows,
          std::ofstream& file) {
  std::vector<PlottedRow> plotted;
  for (const std::string& name : order) {
    const BenchRow& row = rows.at(name);
    const auto [low, high] = std::minmax_element(row.step_ms.begin(), row.step_ms.end());
    plotted.push_back({.name = label_of(a, name),
                       .step_ms = median(row.step_ms),
                       .step_ms_min = *low,
                       .step_ms_max = *high,
                       .peak_mib = row.peak_mib,
                       .formula_mib = row.formula_mib});
  }
  file << bars_of(plotted, fmt::format("{} on {}", a.model, a.task.mesh.str())) << std::flush;
  SHARD_REQUIRE(file.good(), "bench", "cannot write the plot to {}", a.plot);
}

// Runs ours once more, after all rounds, so that no time of theirs contains the measuring.
void write_trace(Arguments a, const std::string& folder, std::ofstream& file) {
  a.spans = folder + "/spans";
  a.task.steps = std::min(a.task.steps, kStepsOfTrace);
  run_process(command_of(a, "ours"), "ours");
  file << chrome_trace(read_spans(a.spans, a.task.mesh.size())) << std::flush;
  SHARD_REQUIRE(file.good(), "bench", "cannot write the trace to {}", a.trace);
  fmt::print("{}: {} steps of {} on every rank; open it in ui.perfetto.dev or chrome://tracing\n", a.trace, a.task.steps,
             a.task.strategy);
}

// As write_trace. The worker writes the file.
void write_profile(Arguments a) {
  a.profiles = true;
  a.task.steps = std::min(a.task.steps, kStepsOfTrace);
  run_process(command_of(a, "ours"), "ours");
  fmt::print("{}: operators, kernels and memory of a step of {}; open it in ui.perfetto.dev or chrome://tracing\n",
             a.task.profile, a.task.strategy);
}

// In a process that write_trace started: the spans of the ranks that it has, from the first timed step on.
void leave_spans(const Arguments& a, const shardproof::Timeline& timeline, const shardproof::ProcessWorld* world) {
  SpansOfRanks spans;
  for (int64_t rank = 0; rank < a.task.mesh.size(); ++rank)
    if (!world || world->rank() == rank) spans[rank] = timeline.of_rank(rank);
  write_spans(spans, fmt::format("step {}", a.task.warmup), a.spans);
}

// Of ours. PyTorch's and `single` are no steps of this library, and what a check of replicas adds is no part of one.
std::vector<Predicted> predictions(const Arguments& a, const std::map<std::string, BenchRow>& rows, const Machine& machine) {
  std::vector<Predicted> predicted;
  for (const char* name : {"ours", "side_by_side"}) {
    const auto measured = rows.find(name);
    if (measured == rows.end()) continue;
    bench::Task task = a.task;
    task.contestant = name;
    predicted.push_back({label_of(a, name), predict(task, machine), measured->second});
  }
  return predicted;
}

int compete(Arguments& a) {
  a.launched.refuse_without_effect();
  SHARD_REQUIRE(a.rounds >= 1 && a.task.steps >= 1 && a.task.warmup >= 0, "bench", "--rounds and --steps must be at least 1");
  const std::vector<std::string> order = contestants(a);
  require_mesh(a, order);
  const auto machine = a.machine.empty() ? std::nullopt : std::optional(chosen_machine(a.machine));
  JsonLines out(a.json);
  std::ofstream trace, drawing;
  if (!a.trace.empty()) trace = opened(a.trace, "trace");  // before the rounds, which take minutes
  if (!a.plot.empty()) drawing = opened(a.plot, "plot");
  if (!a.task.profile.empty()) opened(a.task.profile, "profile");
  std::string folder = (std::filesystem::temp_directory_path() / "shardproof_bench_XXXXXX").string();
  SHARD_REQUIRE(mkdtemp(folder.data()), "bench", "cannot make a folder in {}", std::filesystem::temp_directory_path().string());
  const std::shared_ptr<void> removed(nullptr, [folder](void*) { std::filesystem::remove_all(folder); });
  a.data = folder + "/data";
  if (std::any_of(order.begin(), order.end(), is_peer)) bench::write_data(a.task, a.data);

  std::map<std::string, BenchRow> rows;
  for (int64_t round = 0; round < a.rounds; ++round) {
    double single_ms = 0;
    for (const std::string& name : order) {
      const json result = run_process(command_of(a, name), name);
      if (name == "single") single_ms = median(result["step_ms"].get<std::vector<double>>());
      rows[name].add(result, single_ms);
    }
  }
  bool held = report(a, order, rows, out);
  if (machine) held &= report_predictions(predictions(a, rows, *machine), *machine, out);
  if (!a.plot.empty()) plot(a, order, rows, drawing);
  if (!a.trace.empty()) write_trace(a, folder, trace);
  if (!a.task.profile.empty()) write_profile(a);
  return held ? 0 : 1;
}

}  // namespace

void add_bench_command(CLI::App& app, int& exit_code) {
  auto arguments = std::make_shared<Arguments>();
  Arguments* a = arguments.get();
  CLI::App* command =
      app.add_subcommand("bench", "time a training step against the unsharded one and PyTorch's, in interleaved rounds");
  command
      ->add_option("--against", a->against,
                   fmt::format("the other contestants, separated by commas: single, {}; or fingerprint, which is ours with the "
                               "checks of train --check=fingerprint in each step",
                               fmt::join(kPeers, ", ")))
      ->capture_default_str();
  command->add_option("--strategy", a->task.strategy, strategy_help())->capture_default_str();
  CLI::Option* mesh = command->add_option(
      "--mesh", a->mesh, "the ranks of a contestant: axes dp_replicate, dp_shard and tp, e.g. dp_shard=2,tp=2");
  command->add_option("--ranks", a->ranks, "short for --mesh dp_shard=N; `single` has two threads instead of ranks")
      ->excludes(mesh)
      ->capture_default_str();
  command->add_flag("--sequence-parallel", a->task.sequence_parallel,
                    "cut activations between parallel blocks along the sequence too, over tp");
  command
      ->add_option("--overlap-pieces", a->task.overlap_pieces,
                   "cut our products along tp into so many pieces of the batch, each sent while the next one is multiplied")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command
      ->add_option("--expert-ranks", a->task.expert_ranks,
                   "let so many neighbours along the data-parallel ranks share the experts of a model that has some")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  add_sharding_options(*command, a->task.sharding);
  command->add_option("--model", a->model, "the model: gpt33m, gpt1b or tiny; moe38m or moe_tiny, which have experts")
      ->capture_default_str();
  command->add_option("--precision", a->precision, "fp32; or bf16, where parameters and sums of gradients stay in float32")
      ->check(CLI::IsMember({"fp32", "bf16"}))
      ->capture_default_str();
  command->add_option("--steps", a->task.steps, "how many steps a round times")->capture_default_str();
  command->add_option("--warmup", a->task.warmup, "how many steps run before them without being timed")->capture_default_str();
  command->add_option("--rounds", a->rounds, "how many rounds to run; each runs every contestant once")->capture_default_str();
  command->add_option("--json", a->json, "also write one JSON object for each contestant to this file");
  a->launched.add_to(*command, /*ranks_option=*/false);
  command->add_option("--plot", a->plot, "also draw step times and peaks of memory, as SVG, into this file");
  command->add_option("--machine", a->machine,
                      "also compare with what plan predicts for this machine: a file that plan --calibrate wrote, or a known "
                      "one; calls and bytes must be equal");
  command->add_option("--trace", a->trace,
                      "also write when each rank computed, communicated and waited, in steps after the rounds, to this file");
  command->add_option("--profile", a->task.profile,
                      "also write LibTorch's profile of a step of ours, with a timeline of memory, to this file");
  command->add_option("--spans", a->spans, "write the spans of this process' ranks to this file and their numbers")->group("");
  command->add_flag("--count-tensors", a->task.counts_tensors, "count the bytes of tensors")->group("");
  command->add_option("--worker", a->worker, "run this contestant in this process")->group("");
  add_bench_checkpoint_command(*command, exit_code);
  add_bench_collectives_command(*command, exit_code);
  add_bench_kernels_command(*command, exit_code);
  add_bench_scaling_command(*command, exit_code);
  command->callback([arguments, a, command, &exit_code] {
    if (!command->get_subcommands().empty()) return;  // the subcommand ran instead
    a->task.size = bench::size_of(a->model);
    a->task.bf16 = a->precision == "bf16";
    a->task.mesh = mesh_of(*a);
    if (a->worker.empty()) {
      require_alone(*a);
      exit_code = compete(*a);
      return;
    }
    a->task.contestant = a->worker;
    if (a->launched.options.backend == "nccl") a->launched.options.ranks = a->task.mesh.size();
    a->launched.reproducible = false;
    const auto world = a->launched.start(a->model);
    a->task.device = a->launched.device();
    const auto timeline = a->spans.empty() ? nullptr : std::make_shared<shardproof::Timeline>();
    const json result = bench::run(a->task, world.get(), timeline);
    if (timeline) leave_spans(*a, *timeline, world.get());
    if (!world || world->rank() == 0) fmt::print("{}\n", result.dump());
  });
}

}  // namespace harness
